"""The boxes of all ranks side by side, with what the rules of the guard ask of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lockstep.blackbox.snapshot import Op, Snapshot
from lockstep.guard.diagnosis import RankLocation
from lockstep.guard.node_exchange import Node
from lockstep.guard.rank_location import at, by_place, label

HISTORY = 128
"""Collectives of a rank that are compared, counted from its latest."""
_FRESH = 2.0
"""Seconds for which a reporter's word on torch's own collectives holds. One that waits there reports more often."""
_STACKS = 4
"""Stacks that a diagnosis keeps."""


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """All boxes at one moment."""

    boxes: list[Snapshot]
    """Of all ranks that are known of, by rank."""
    blocked_for: float
    """Seconds in one collective after which a rank counts as waiting."""
    stall: float
    """Seconds after which a wait that may still end is told."""
    lost: Sequence[Node] = ()
    node: Node | None = None
    """Nodes that do not answer."""
    restarts: bool = False
    """Whether ranks are started again when one has failed."""

    @cached_property
    def generation(self) -> int:
        """The newest process group."""
        return max(box.generation for box in self.boxes)

    @cached_property
    def members(self) -> list[Snapshot]:
        """Ranks that belong to it."""
        return [box for box in self.boxes if box.generation == self.generation]

    @cached_property
    def here(self) -> list[Snapshot]:
        """Those of them that have not left the job."""
        return [box for box in self.members if not is_gone(box)]

    @cached_property
    def histories(self) -> dict[int, dict[int, Op]]:
        """Rank -> number -> collective, in the newest process group."""
        return {box.rank: history_of(box) for box in self.members}

    @cached_property
    def averaging(self) -> set[int]:
        """Numbers of collectives in which some rank is in one of torch's own."""
        return {box.op.seq for box in self.here if box.op is not None and box.raw is not None}

    @cached_property
    def reforming(self) -> bool:
        """Whether some are still on their way into the newest process group, or it is not theirs."""
        return any(box.generation != self.generation for box in self.boxes)

    @cached_property
    def unseen(self) -> list[int]:
        """Ranks whose boxes were not read."""
        seen = {box.rank for box in self.boxes}
        return [rank for rank in range(max(box.world_size for box in self.boxes)) if rank not in seen]

    @cached_property
    def parted(self) -> int | None:
        """The number since which ranks make calls of one name at different lines: one has made a call more."""
        sites: dict[int, str] = {}
        several: set[int] = set()
        for history in self.histories.values():
            for number, op in history.items():
                if op.site and sites.setdefault(number, op.site) != op.site:
                    several.add(number)
        common = min((max(history, default=0) for history in self.histories.values()), default=0)
        first = None
        while common in several:
            first, common = common, common - 1
        return first

    @cached_property
    def apart(self) -> tuple[RankLocation, ...]:
        """Where the ranks were at that number."""
        number = self.parted
        if number is None:
            return ()
        calls = [(rank, history[number]) for rank, history in self.histories.items() if number in history]
        return by_place((rank, (f"called {label(op)}", op.site, "")) for rank, op in calls)

    def is_certain(self, involved: Iterable[Snapshot]) -> bool:
        """Whether a proof holds: not while these ranks, or the whole group, are being put together again."""
        return not self.reforming and not any(box.recovering for box in involved)

    def together(self, before: int | None = None) -> str:
        """The last collective that all have completed, below number ``before``."""
        if self.reforming:
            return ""
        number = min(box.left for box in self.members)
        if self.parted is not None:
            number = min(number, self.parted - 1)
        if before is not None:
            number = min(number, before - 1)
        op = next((history[number] for history in self.histories.values() if number in history), None)
        return at(op) if op is not None else ""

    def stacks(self, places: Sequence[RankLocation]) -> dict[int, tuple[str, ...]]:
        """The stack of one rank of each place, where there is one."""
        known = {box.rank: box.stack for box in self.boxes if box.stack}
        chosen = [next((rank for rank in place.ranks if rank in known), None) for place in places]
        return {rank: known[rank] for rank in [rank for rank in chosen if rank is not None][:_STACKS]}


def is_gone(box: Snapshot) -> bool:
    """Whether it has left the job, one way or the other."""
    return bool(box.closed) or not box.alive


def history_of(box: Snapshot) -> dict[int, Op]:
    """Its collectives in its present group: numbers start anew in each, so the list is read from its end."""
    found: dict[int, Op] = {}
    last = box.entered
    if box.op is not None:
        found[box.op.seq] = box.op
        last = box.op.seq
    for op in reversed(box.history[-HISTORY:]):
        if op.seq > last or (op.seq == last and op.seq in found and op.name != found[op.seq].name):
            break
        found.setdefault(op.seq, op)
        last = op.seq - 1
    return found


def waited(box: Snapshot) -> float:
    """For how long it is in the collective it is in; 0 when in none, or in one that waits for nobody."""
    if box.op is None or is_alone(box.op):
        return 0.0
    return box.now - box.op.since


def is_alone(op: Op) -> bool:
    """Whether it asks nothing of other ranks: a backward that does not average gradients."""
    return "no_sync" in op.name or "no sync" in op.name


def raw_waited(box: Snapshot) -> float:
    """For how long it is in one of torch's own collectives, as far as its word is recent."""
    if box.raw is None or is_gone(box) or (box.beat and box.now - box.beat > _FRESH):
        return 0.0
    return box.now - box.raw.since
