"""One rank slower than the others: which, in what, and what it costs the job.

With DDP all ranks leave backward at the same moment, so wall times hide who was late. What counts is a rank's own work
in a step: fetching data, forward, and backward up to the moment at which its last gradients were on their way. The
rank's reporter puts that together: when the loader was asked and answered, when backward was entered and left (noted by
the loop), and when torch started the collectives inside it (its Flight Recorder, which is on anyway).

Where worker processes read ahead, not waiting for data is no proof of a quick loader. Of equal ranks that are all as
slow as their loaders, the one that happens to have a batch in reserve keeps it, and the other one waits in every step.
So where there are workers, a rank's own work on data is what these are busy in a step, which the reporter samples.

A machine compares its own ranks by itself. Whoever is slow elsewhere shows in that all of its ranks wait: only then are
the other machines asked, and ever more seldom where nobody stands out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from lockstep.blackbox.snapshot import Snapshot, Step
from lockstep.rundir.format_ranks import name_ranks

STEPS = 50
"""Steps that a verdict needs from each rank."""
EXCESS = 0.2
"""By how much of the others' time a rank must be slower."""
LEAST = 0.002
"""Seconds by which it must be slower: of shorter steps the scheduler of a busy machine takes as much now and then."""
SETTLE = 3.0
"""Seconds for which all ranks must have waited before other machines are asked: their times come a little later."""
PAUSE, LONGEST = 300.0, 1800.0
"""Seconds between the first two questions; each time twice as many, up to the second."""
_PHASES = ("data", "forward", "backward")
_ADVICE = {
    "data": "Look at what its loader reads: a slower disk or mount, larger samples, too few num_workers.",
    "forward": "Look for larger inputs there, other programs on its device or cores, throttling for heat or power.",
    "backward": "Look for larger inputs there, other programs on its device or cores, throttling for heat or power.",
}


def own_times(
    fetches: Sequence[tuple[float, float]],
    backwards: Sequence[tuple[float, float]],
    started: Sequence[float],
    busy: float = 0.0,
) -> list[Step]:
    """The times of each step of which all is known.

    The first two are a clock's; ``started`` says when torch started a collective. All in the same seconds, in order.
    ``busy`` is the share of their time that the loader's workers are.
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
            own = answered - asked, began - answered, started[last] - began
            whole = asked_next - asked
            steps.append((*own, whole, left - started[last], busy * whole))
    return steps


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank that the others wait for in every step, or all ranks of a machine."""

    ranks: tuple[int, ...]
    host: str
    """Their machine."""
    device: str
    """What they compute on."""
    phase: str
    """In what they lose most: "data", "forward" or "backward"."""
    own: float
    """Seconds of their own work in a step."""
    others: float
    """The same of the others."""
    more: float
    """Seconds that they take longer in that phase."""
    lost: float
    """The share of the job's time that is spent waiting for them."""

    def line(self) -> str:
        """For the screen."""
        are, their, them = "is slower than the other ranks", "its", "it"
        if len(self.ranks) > 1:
            are, their, them = "are slower than those of the other machines", "their", "them"
        who = f"{name_ranks(self.ranks).capitalize()} ({self.host}, {self.device})"
        return (
            f"{who} {are}: {_ms(self.own)} of {their} own work in each step against {_ms(self.others)}, most of it in "
            f"{self.phase} (+{_ms(self.more)}). All ranks wait for {them}: the job loses {self.lost:.0%} of its time. "
            f"{_ADVICE[self.phase]}"
        )

    def to_dict(self) -> dict[str, Any]:
        """For the watchers of other machines."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Slow:
        """The same again."""
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})


def find_slow(boxes: Sequence[Snapshot]) -> Slow | None:
    """The slowest rank, if it stands out; if none does, the slowest of several machines.

    Its median must exceed the others' by a fifth, and even its quick steps their slow ones: on a machine that is busy
    with other things medians of equal ranks differ too, but their times overlap.
    """
    known = [box for box in boxes if len(box.pace) >= STEPS and box.alive and not box.closed]
    if len(known) < 2 or len(known) < sum(not box.closed for box in boxes):
        return None
    machines: dict[int, list[Snapshot]] = {}
    for box in known:
        machines.setdefault(box.node, []).append(box)
    slow = _slowest([[box] for box in known])
    return slow or (_slowest(list(machines.values())) if len(machines) > 1 else None)


def _slowest(parts: Sequence[Sequence[Snapshot]]) -> Slow | None:
    """The slowest of these parts of the job, if it stands out against the rest."""
    late = max(parts, key=_typical)
    rest = [box for part in parts if part is not late for box in part]
    typical, others = _typical(late), _typical(rest)
    if typical <= (1 + EXCESS) * others or typical - others < LEAST:
        return None
    if min(quantiles(_own(box), n=4)[0] for box in late) <= max(quantiles(_own(box), n=4)[2] for box in rest):
        return None
    more = {phase: _at(late, place) - _at(rest, place) for place, phase in enumerate(_PHASES)}
    phase = max(more, key=lambda name: more[name])
    whole = _at(late, 3)
    devices = list(dict.fromkeys(box.device for box in late))
    return Slow(
        ranks=tuple(box.rank for box in late),
        host=late[0].host,
        device=devices[0] if len(devices) == 1 else f"{len(devices)} devices",
        phase=phase,
        own=typical,
        others=others,
        more=min(more[phase], typical - others),
        lost=min(1.0, (typical - others) / whole) if whole else 0.0,
    )


def all_wait(boxes: Sequence[Snapshot]) -> bool:
    """Whether every rank of a machine waits in each step, for as long as somebody slow would make it wait."""
    here = [box for box in boxes if not box.closed]
    return bool(here) and all(len(box.pace) >= STEPS and box.alive and _waits(box) for box in here)


def _waits(box: Snapshot) -> bool:
    steps = box.pace[-STEPS:]
    # An accelerator's host does not wait in backward but where it next needs a result, and for its own device too.
    waited = median(step[4] if box.device == "cpu" else step[3] - sum(step[:3]) for step in steps)
    return waited >= LEAST and waited > EXCESS * median(_own(box))


class QuestionSchedule:
    """When other machines are worth a question about who is slow: not at once, and ever more seldom."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._after = 0.0
        self._pause = PAUSE

    def due(self, waits: bool, now: float) -> bool:
        """Whether to ask, by whether all ranks here wait."""
        if not waits:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now >= max(self._since + SETTLE, self._after)

    def put_off(self, now: float) -> None:
        """Somebody has asked, or told."""
        self._after = now + self._pause
        self._pause = min(2 * self._pause, LONGEST)


def _own(box: Snapshot) -> list[float]:
    # Workers read while the rank computes, so the longer of the two counts.
    return [
        max(forward + backward, workers) if workers else data + forward + backward
        for data, forward, backward, _, _, workers in box.pace[-STEPS:]
    ]


def _typical(boxes: Sequence[Snapshot]) -> float:
    return median(median(_own(box)) for box in boxes)


def _at(boxes: Sequence[Snapshot], place: int) -> float:
    return median(median(step[place] for step in box.pace[-STEPS:]) for box in boxes)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"
