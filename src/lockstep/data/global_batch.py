"""A round: what all ranks work on at one time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 8


@dataclass(slots=True, unsafe_hash=True)  # not frozen, which costs a microsecond a batch; nobody changes one
class GlobalBatch:
    """One batch on every rank, told apart from the others by where its samples stand in the epoch's order.

    A rank's own samples come first in its batch, and ranks follow each other in the order of the epoch; samples that
    were repeated to fill a batch come after.
    """

    start: int
    """Where the round's first sample stands in the order of the epoch."""
    rows: tuple[int, ...]
    """Samples in each rank's batch; 0 for a rank that has none."""
    real: tuple[int, ...]
    """How many of them are no repeats."""
    ids: Sequence[int] = field(default=(), compare=False)
    """This rank's samples: indices into a map-style data set, places in the stream of an iterable one."""
    worker: int = field(default=0, compare=False)
    """The worker process whose stream the samples are from."""
    size: int = field(default=0, compare=False)
    """Samples in a full batch, where some rank's batch may be shorter; 0 where none is."""
    ends: Mapping[int, int] | None = field(default=None, compare=False)
    """Where the streams of several workers go on after this round, if its samples are from several."""

    @property
    def complete(self) -> bool:
        """Whether every rank has a full batch and no sample is a repeat."""
        return self.real == self.rows and len(set(self.rows)) == 1 and self.rows[0] >= self.size

    @property
    def end(self) -> int:
        """Where the next round starts."""
        return self.start + sum(self.real)

    def pass_on(self, places: list[int]) -> None:
        """Note in the places of the workers' streams that this round was handed out."""
        if self.ends is None:
            places[self.worker] = self.end
        else:
            for worker, end in self.ends.items():
                places[worker] = end


class ItemCounts:
    """How many rows or objects the script passes to metrics for each sample of a loader, learnt in one iteration.

    Of a short batch alone this cannot be told: 4 rows for 2 samples, at a batch size of 4, are 2 for each sample, or 1
    for each sample of a batch that was padded.
    """

    def __init__(self) -> None:
        self._first: GlobalBatch | None = None
        self._now: GlobalBatch | None = None
        self._call = 0
        self._known: dict[Any, int] = {}

    def begin(self, now: GlobalBatch) -> bool:
        """Count a call; whether it is one to learn from: in the first round that metrics were gathered in."""
        if now is not self._now:
            self._now, self._call = now, 0
            self._first = self._first or now
        self._call += 1
        return now is self._first

    def learn(self, key: Any, count: int, rows: int) -> None:
        """Note that a batch of so many rows came with so many items in the place that the key stands for."""
        if count % rows == 0:
            self._known[self._call, key] = count // rows

    def per_sample(self, key: Any) -> int | None:
        """How many items there are for each sample in this call; None when that is not known."""
        return self._known.get((self._call, key))


def name_samples(ids: Sequence[Any]) -> str:
    """These samples, in words."""
    if len(ids) == 1:
        return f"sample {ids[0]}"
    shown = ", ".join(str(one) for one in ids[:_SHOWN])
    return f"samples {shown}{', …' if len(ids) > _SHOWN else ''}"
