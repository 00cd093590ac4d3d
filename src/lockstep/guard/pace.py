"""One rank slower than the others: which, in what, and what it costs the job.

With DDP all ranks leave backward at the same moment, so wall times hide who was late. What counts is a rank's own work
in a step: fetching data, forward, and backward up to the moment at which its last gradients were on their way. The
rank's reporter puts that together: when the loader was asked and answered, when backward was entered and left (noted by
the loop), and when torch started the collectives inside it (its Flight Recorder, which is on anyway).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from lockstep.blackbox.snapshot import Snapshot

STEPS = 50
"""Steps that a verdict needs from each rank."""
EXCESS = 0.2
"""By how much of the others' time a rank must be slower."""
LEAST = 0.002
"""Seconds by which it must be slower: of shorter steps the scheduler of a busy machine takes as much now and then."""
_KEPT = 64
_PHASES = ("data", "forward", "backward")
_ADVICE = {
    "data": "Look at what its loader reads: a slower disk or mount, larger samples, too few num_workers.",
    "forward": "Look for larger inputs there, other programs on its device or cores, throttling for heat or power.",
    "backward": "Look for larger inputs there, other programs on its device or cores, throttling for heat or power.",
}


class Clock:
    """When this rank asked for data and got it, entered backward and left it: its latest steps while it is on."""

    __slots__ = ("backwards", "fetches", "on")

    def __init__(self) -> None:
        self.on = False
        """Whether the loop is to note its times: now and then is enough."""
        self.fetches: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        """When the loader was asked, and when it answered."""
        self.backwards: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        """When a backward that averages gradients was entered and left."""


def own_times(
    fetches: Sequence[tuple[float, float]], backwards: Sequence[tuple[float, float]], started: Sequence[float]
) -> list[tuple[float, float, float, float]]:
    """Seconds of data, forward, own backward and the whole of each step of which all is known.

    The first two are a clock's; ``started`` says when torch started a collective. All in the same seconds, in order.
    """
    steps = []
    entered = [pair[0] for pair in backwards]
    for (asked, answered), (asked_next, _) in pairwise(fetches):
        place = bisect_left(entered, answered)
        if place == len(entered) or entered[place] >= asked_next:
            continue  # no update in this step: accumulating, or evaluating
        began, left = backwards[place]
        # The last that began inside: one that the script starts after backward is none of this.
        last = bisect_left(started, left) - 1
        if last >= 0 and started[last] >= began:
            steps.append((answered - asked, began - answered, started[last] - began, asked_next - asked))
    return steps


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank that the others wait for in every step."""

    rank: int
    """Which."""
    host: str
    """Its machine."""
    device: str
    """What it computes on."""
    phase: str
    """In what it loses most: "data", "forward" or "backward"."""
    own: float
    """Seconds of its own work in a step."""
    others: float
    """The same of the others."""
    more: float
    """Seconds that it takes longer in that phase."""
    lost: float
    """The share of the job's time that is spent waiting for it."""

    def line(self) -> str:
        """For the screen."""
        return (
            f"Rank {self.rank} ({self.host}, {self.device}) is slower than the other ranks: {_ms(self.own)} of its own "
            f"work in each step against {_ms(self.others)}, most of it in {self.phase} (+{_ms(self.more)}). All ranks "
            f"wait for it: the job loses {self.lost:.0%} of its time. {_ADVICE[self.phase]}"
        )


def find_slow(boxes: Sequence[Snapshot]) -> Slow | None:
    """The slowest rank, if it stands out.

    Its median must exceed the others' by a fifth, and even its quick steps their slow ones: on a machine that is busy
    with other things medians of equal ranks differ too, but their times overlap.
    """
    paces = {box.rank: box.pace[-STEPS:] for box in boxes if len(box.pace) >= STEPS and box.alive and not box.closed}
    if len(paces) < 2 or len(paces) < sum(not box.closed for box in boxes):
        return None
    own = {rank: [sum(step[:3]) for step in pace] for rank, pace in paces.items()}
    slowest = max(own, key=lambda rank: median(own[rank]))
    typical = median(own[slowest])
    others = median(median(times) for rank, times in own.items() if rank != slowest)
    if typical <= (1 + EXCESS) * others or typical - others < LEAST:
        return None
    quick = quantiles(own[slowest], n=4)[0]
    if any(quick <= quantiles(times, n=4)[2] for rank, times in own.items() if rank != slowest):
        return None
    more = {
        phase: median(step[place] for step in paces[slowest])
        - median(median(step[place] for step in pace) for rank, pace in paces.items() if rank != slowest)
        for place, phase in enumerate(_PHASES)
    }
    phase = max(more, key=lambda name: more[name])
    whole = median(step[3] for step in paces[slowest])
    box = next(box for box in boxes if box.rank == slowest)
    return Slow(
        rank=slowest,
        host=box.host,
        device=box.device,
        phase=phase,
        own=typical,
        others=others,
        more=more[phase],
        lost=min(1.0, (typical - others) / whole) if whole else 0.0,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
