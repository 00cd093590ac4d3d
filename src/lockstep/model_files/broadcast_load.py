"""Stored tensors that only rank 0 can read: it sends them as they are asked for, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.objects import all_objects, broadcast_object_list
from lockstep.comm.tensors import broadcast
from lockstep.errors import CheckpointError
from lockstep.model_files.tensor_entry import is_stored
from lockstep.model_files.weights import Weights
from lockstep.process_group.group import Group


@dataclass(frozen=True)
class SentTensor:
    """A tensor that comes from rank 0 when it is read, which all ranks do at once."""

    group: Group = field(repr=False)
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Any = None
    """Where rank 0 has it from."""

    @property
    def file(self) -> Any:
        """The file it is from, on rank 0."""
        return getattr(self.source, "file", None)

    def read(self) -> Tensor:
        """Called on: all ranks. The tensor, in memory of its own."""
        between = torch.empty(self.shape, dtype=self.dtype)
        if self.source is not None:
            self.source.read_into(between)
        moved = between.to(self.group.device)
        broadcast(self.group, moved)
        return moved

    def read_into(self, target: Tensor) -> None:
        """Called on: all ranks. Overwrite the target."""
        target.copy_(self.read())


@contextmanager
def from_rank_0(group: Group, opened: Callable[[], AbstractContextManager[Weights]]) -> Iterator[Weights]:
    """Called on: all ranks. What rank 0 has opened; when it cannot, all of them raise."""
    if group.rank:
        yield _received(group, *broadcast_object_list(group, [None]))
        return
    with ExitStack() as stack:
        try:
            weights = stack.enter_context(opened())
        except Exception as error:
            broadcast_object_list(group, [str(error)])
            raise
        described = {name: _described(entry) for name, entry in weights.entries.items()}
        broadcast_object_list(group, [(described, weights.surplus)])
        sent = {
            name: SentTensor(group, entry.shape, entry.dtype, entry) if is_stored(entry) else entry
            for name, entry in weights.entries.items()
        }
        yield Weights(weights.files, sent, weights.surplus)


def _described(entry: Any) -> Any:
    return SentTensor(None, entry.shape, entry.dtype) if is_stored(entry) else entry  # type: ignore[arg-type]


def _received(group: Group, received: Any) -> Weights:
    if isinstance(received, str):
        raise CheckpointError(f"Rank 0, which reads for all, could not: {received}")
    entries, surplus = received
    for name, entry in entries.items():
        if is_stored(entry):
            entries[name] = SentTensor(group, entry.shape, entry.dtype)
    return Weights((), entries, surplus)


def all_or_none(group: Group, step: Callable[[], Any]) -> Any:
    """Called on: all ranks. The step's result; when it raises on some rank, it does so on all."""
    error: Exception | None = None
    result = None
    try:
        result = step()
    except Exception as caught:
        error = caught
    received = all_objects(group, None if error is None else str(error), "checking a checkpoint")
    if error is not None:
        raise error
    for rank, text in enumerate(received):
        if text is not None:
            raise CheckpointError(f"Rank {rank} cannot load the checkpoint, so none does: {text}")
    return result
