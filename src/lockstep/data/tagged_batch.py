"""Rounds that travel beside the batches of a stream, also out of a worker process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.data.global_batch import GlobalBatch
from lockstep.data.shards import ShardedIterable
from lockstep.data.worker_tails import WorkerTail


class Tagged:
    """A collated batch and its round; or what a worker has left, which is not collated yet."""

    __slots__ = ("batch", "round")

    def __init__(self, batch: Any, round_: GlobalBatch) -> None:
        self.batch = batch
        self.round = round_

    def pin_memory(self, device: Any = None) -> Tagged:
        """What torch calls on what it does not know."""
        from lockstep.torch_internals.data_loader import pin

        self.batch = pin(self.batch, device)
        return self


class Tagging:
    """The user's collate function; its batches come with the round that the stream has noted for them."""

    def __init__(self, stream: ShardedIterable, collate: Callable[[Any], Any]) -> None:
        self.stream = stream
        self.collate = collate

    def __call__(self, items: Any) -> Tagged:
        """Collate, in the process that read the items."""
        latest = self.stream.latest
        assert latest is not None  # set before the first item is given out
        first = items[0] if isinstance(items, list) and items else items
        if isinstance(first, WorkerTail):
            return Tagged(first, latest)
        return Tagged(self.collate(items), latest)
