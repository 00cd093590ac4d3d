"""Tensors without data, what dispatches operations, and torch's own trees."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

LOOKS_AT_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What an operation raises that needs the values of a tensor without data.

Needs these names of ``torch._subclasses.fake_tensor``; 2.9 to 2.13. Without them: such a model's forecast ends with
torch's own error.
"""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """While this is entered, operations compute shapes only; tensors that have data are taken along.

    Needs ``torch._subclasses.fake_tensor.FakeTensorMode``; 2.9 to 2.13. Without it: the meta device, which chooses
    other kernels than the CPU (attention) and has no autocast, so that forecasts of memory were less exact.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True  # it would write a traceback before the error that is raised anyway
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before


def real_tensors() -> Any:
    """Inside ``fake_tensors``: a region in which tensors have data again.

    Needs ``torch._subclasses.fake_tensor.unset_fake_temporarily``; 2.9 to 2.13. Without it: an optimizer that reads a
    number out of its state ends the forecast.
    """
    return unset_fake_temporarily()


DispatchMode = TorchDispatchMode
"""A base class whose ``__torch_dispatch__`` sees every operation while it is entered.

Needs ``torch.utils._python_dispatch.TorchDispatchMode``; 2.9 to 2.13. Without it: no forecast of activations.
"""


def leaves(tree: Any) -> list[Any]:
    """The leaves of a structure, as operations of torch take and give them.

    Needs ``torch.utils._pytree.tree_leaves``; 2.9 to 2.13. Without it: ``comm/trees.py``, which knows other types.
    """
    return tree_leaves(tree)


def map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """The structure with what is of one type replaced.

    Needs ``torch.utils._pytree.tree_map_only``; 2.9 to 2.13. Without it: as for ``leaves``.
    """
    return tree_map_only(kind, function, tree)
