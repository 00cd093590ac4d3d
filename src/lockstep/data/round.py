"""A round: what all ranks work on at one time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 8


@dataclass(slots=True, unsafe_hash=True)  # not frozen, which costs a microsecond a batch; nobody changes one
class Round:
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

    @property
    def complete(self) -> bool:
        """Whether every rank has equally many rows and none is a repeat."""
        return self.real == self.rows and len(set(self.rows)) == 1

    @property
    def end(self) -> int:
        """Where the next round starts."""
        return self.start + sum(self.real)


def name_samples(ids: Sequence[Any]) -> str:
    """These samples, in words."""
    if len(ids) == 1:
        return f"sample {ids[0]}"
    shown = ", ".join(str(one) for one in ids[:_SHOWN])
    return f"samples {shown}{', …' if len(ids) > _SHOWN else ''}"
