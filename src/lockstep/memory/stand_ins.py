"""Tensors without data: they have a shape, a type and a device, and take no memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from lockstep.errors import UsageError


@contextmanager
def no_data() -> Iterator[None]:
    """While this is entered, operations compute shapes only, as the CPU would have them.

    The meta device alone would do for sizes, but it chooses other kernels than the CPU (attention), and has no
    autocast.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True  # it would write a traceback before the error that is raised anyway
    try:
        # Constants that a module keeps outside its parameters and buffers are taken along.
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"The model or its loss looks at the values of a tensor ({error}), and tensors on the meta device have "
            "none. Measure a model on a real device instead, by lockstep.utils.estimate_memory."
        ) from error
    finally:
        log.disabled = before


@contextmanager
def stand_ins(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside `no_data`: give the model tensors without data, in another type if one is given; then its own back."""
    made: dict[int, Tensor] = {}

    def replace(tensor: Tensor) -> Tensor:
        # One stand-in for each tensor: weights that are tied stay tied.
        if id(tensor) not in made:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            bare = torch.empty_like(tensor, dtype=kind, device="cpu", requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                bare = nn.Parameter(bare, requires_grad=tensor.requires_grad)
            made[id(tensor)] = bare
        return made[id(tensor)]

    undo: list[Callable[[], Any]] = []
    try:
        for module in model.modules():
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
            for place in places:
                for name, tensor in list(place.items()):
                    if isinstance(tensor, Tensor):
                        undo.append(_putting_back(place, name, tensor))
                        place[name] = replace(tensor)
        yield
    finally:
        for put_back in undo:
            put_back()


def _putting_back(place: dict[str, Any], name: str, tensor: Tensor) -> Callable[[], None]:
    return lambda: place.__setitem__(name, tensor)
