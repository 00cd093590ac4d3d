"""The end of a stream that several workers read: one last round for all of them.

Each worker process has a stream of its own. What it has left when there is no full round any more is not filled up
there: with a tail for each worker, an epoch would have more steps than its length, and repeat more samples than one
last round needs. So workers send what they have left as it is, and the loader's process puts it together in the order
of the workers, deals it out in rounds, and collates it.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.comm import trees
from lockstep.data.global_batch import GlobalBatch

if TYPE_CHECKING:
    from lockstep.data.shards import ShardedIterable

_Item = TypeVar("_Item")
_Sample = tuple[int, int, Any]
"""A worker, a place in its stream, and what stands there."""


@dataclass(frozen=True, slots=True)
class WorkerTail:
    """What one worker has left, on its way to the loader's process."""

    worker: int
    start: int
    """Where in the worker's stream it begins."""
    payload: bytes
    """The samples, and those that the stream begins with, pickled."""

    def samples(self) -> tuple[list[_Sample], list[_Sample]]:
        """What is left, and the head of the stream, to fill a round with."""
        left, head = pickle.loads(self.payload)
        return (
            [(self.worker, self.start + number, item) for number, item in enumerate(left)],
            [(self.worker, number, item) for number, item in enumerate(head)],
        )


def pack(worker: int, start: int, left: list[Any], head: list[Any]) -> WorkerTail | None:
    """A worker's tail; None when its samples cannot be pickled, only what is collated from them."""
    try:
        # A view of a large tensor would be pickled with all of it.
        whole = trees.map_tensors(lambda leaf: leaf.clone(), (left, head))
        # Here, as torch's queue would drop what it cannot pickle, and the loader would wait for it.
        return WorkerTail(worker, start, pickle.dumps(whole))
    except Exception:
        return None


def distribute(
    stream: ShardedIterable, tails: Sequence[WorkerTail], collate: Callable[[Any], Any], *, batched: bool
) -> Iterator[tuple[Any, GlobalBatch]]:
    """This rank's batches of what the workers have left, each with its round."""
    spec, share = stream.spec, stream.share
    left: list[_Sample] = []
    head: list[_Sample] = []
    for tail in sorted(tails, key=lambda one: one.worker):
        own, first = tail.samples()
        left += own
        head += first
    # A rank that reads for all deals batches, in rounds wherever the workers' last full ones have ended.
    size = share if spec.reads_for_all else stream.size
    for place in range(0, len(left), size):
        samples = left[place : place + size]
        real = len(samples)
        if real < size and stream.drop_last:
            return
        if spec.pads_last and real < size and not (spec.reads_for_all and spec.pad_empty_ranks_only):
            samples = [*samples, *itertools.islice(itertools.cycle(head), size - real)]
        if spec.reads_for_all:
            round_ = GlobalBatch(samples[0][1], (len(samples),), (real,), size=share)
            parts = iter([(round_, samples)])
        else:
            parts = spec.slices(spec.tail(samples[0][1], share, real), samples, share)
        ends = {worker: at + 1 for worker, at, _ in samples[:real]}
        for part, own in parts:
            items = [item for _, _, item in own]
            ids = [at for _, at, _ in own]
            yield collate(items if batched else items[0]), replace(part, ids=ids, ends=ends)


def whole_rounds(items: Iterator[_Item], count: int) -> Iterator[_Item]:
    """The items without those of a last round that has not so many."""
    while len(found := list(itertools.islice(items, count))) == count:
        yield from found
