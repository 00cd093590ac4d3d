"""Who does what when: code for one process only, one process first, and work divided between processes."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from lockstep.comm import tensors
from lockstep.comm.barrier import barrier
from lockstep.errors import ConfigError
from lockstep.process_group.group import Group
from lockstep.topology.topology import Topology

Function = TypeVar("Function", bound=Callable[..., Any])


def only_on(chosen: bool, function: Function) -> Function:
    """The function where it is ``chosen`` to run; elsewhere one that does nothing."""
    if chosen:
        return function

    @functools.wraps(function)
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing  # type: ignore[return-value]


@contextmanager
def first(group: Group, am_first: bool) -> Iterator[None]:
    """Called on: all ranks. The chosen ranks run the block, then the others, even when the first ones fail in it."""
    if not am_first:
        barrier(group)
    try:
        yield
    finally:
        if am_first:
            barrier(group)


def print_here(topology: Topology, *args: Any, **kwargs: Any) -> None:
    """Print once per machine."""
    if topology.is_local_main:
        print(*args, **kwargs)
        if kwargs.get("file") in (None, sys.stdout):
            # What stands in for stdout may have no flush, and there may be no stdout at all.
            getattr(sys.stdout, "flush", lambda: None)()


def any_rank(group: Group, flag: bool, name: str) -> bool:
    """Called on: all ranks. Whether the flag is set on any; ``name`` is what the guard calls it."""
    number = group.box.enter(name, None, 2)
    try:
        return bool(tensors.reduce(group, torch.tensor(int(flag), device=group.device), "sum"))
    finally:
        group.box.leave(number)


def share(inputs: Any, topology: Topology, apply_padding: bool = False) -> Any:
    """This process's part of a list, tuple, tensor, string or mapping of these.

    The first ranks get one more where it does not divide. With padding, the last item is repeated so that all parts
    have the same length.
    """
    if topology.world_size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError(
                f"split_between_processes got a mapping whose values differ in length: {lengths}. "
                "All must have the same length."
            )
        parts = {key: share(value, topology, apply_padding) for key, value in inputs.items()}
        if type(inputs) is dict:
            return parts
        fresh: Any = copy.copy(inputs)  # constructors of other mappings differ too much to call
        fresh.update(parts)
        return fresh
    try:
        length = len(inputs)
        inputs[:0]
    except (TypeError, KeyError):
        raise ConfigError(
            f"split_between_processes cannot divide a {type(inputs).__name__}. "
            "Allowed: lists, tuples, tensors, data sets with select(), and mappings of these."
        ) from None
    base, extra = divmod(length, topology.world_size)
    start = topology.rank * base + min(topology.rank, extra)
    end = start + base + (topology.rank < extra)
    longest = base + (extra > 0)
    part = (
        inputs.select(range(start, end))
        if hasattr(inputs, "select") and hasattr(inputs, "features")
        else inputs[start:end]
    )
    missing = longest - (end - start)
    if not apply_padding or missing == 0 or length == 0:
        return part
    return _padded(inputs, part, missing, start, end)


def _is_dataset(inputs: Any) -> bool:
    """Whether this is a data set of the datasets library, whose slices are plain dicts."""
    return hasattr(inputs, "select") and hasattr(inputs, "features")


def _padded(inputs: Any, part: Any, missing: int, start: int, end: int) -> Any:
    places = [*range(start, end), *[len(inputs) - 1] * missing]
    if isinstance(inputs, (torch.Tensor, np.ndarray)):
        return inputs[places]
    if _is_dataset(inputs):
        return inputs.select(places)
    if isinstance(inputs, (list, tuple, str, bytes)):
        return part + inputs[-1:] * missing
    return [inputs[place] for place in places]
