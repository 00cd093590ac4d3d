"""Tensors without data: they have a shape, a type and a device, and take no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.torch_internals.fake import LOOKS_AT_VALUES, fake_tensors
from lockstep.torch_internals.module import tensor_tables


@contextmanager
def no_data() -> Iterator[None]:
    """While this is entered, operations compute shapes only, as the CPU would have them.

    The meta device alone would do for sizes, but it chooses other kernels than the CPU (attention), and has no
    autocast.
    """
    try:
        with fake_tensors():
            yield
    except LOOKS_AT_VALUES as error:
        raise UsageError(
            f"The model or its loss looks at the values of a tensor ({error}), and tensors on the meta device have "
            "none. Measure a model on a real device instead, by lockstep.utils.estimate_memory."
        ) from error


@contextmanager
def stand_ins(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside `no_data`: give the model tensors without data, in another type if one is given; then its own back."""

    def bare(tensor: Tensor) -> Tensor:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        made = torch.empty_like(tensor, dtype=kind, device="cpu", requires_grad=False)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    with _replaced(model, bare):
        yield


@contextmanager
def copies(model: nn.Module) -> Iterator[None]:
    """Give the model parameters with the same data and buffers with a copy of theirs; then its own back.

    What is hooked to its own parameters is not run meanwhile, such as DDP's collectives, and their gradients are not
    touched.
    """

    def fresh(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(tensor.detach(), tensor.requires_grad)
        return tensor.detach().clone()

    with _replaced(model, fresh):
        yield


@contextmanager
def _replaced(model: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """One new tensor for each, so that weights which are tied stay tied."""
    made: dict[int, Tensor] = {}
    before: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for module in list(model.modules()):
            parameters, buffers = tensor_tables(module)
            for name, tensor in [*parameters.items(), *buffers.items(), *vars(module).items()]:
                if isinstance(tensor, Tensor):
                    before.append((module, name, tensor))
                    if id(tensor) not in made:
                        made[id(tensor)] = make(tensor)
                    setattr(module, name, made[id(tensor)])  # not past the module: an LSTM keeps a list of its own
        yield
    finally:
        for module, name, tensor in before:
            setattr(module, name, tensor)
