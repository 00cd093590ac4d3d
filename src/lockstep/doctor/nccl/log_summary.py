"""What the logs of a job tell together: versions, ranks, who talks to whom over what, and what went wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.doctor.nccl.knowledge import LogPattern
from lockstep.doctor.nccl.watchdog_state import Waiting

UNKNOWN, FOLLOWS = 1, 2
_WEIGHTS = {"cause": 0, "follows": FOLLOWS}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One kind of trouble on one rank, as it was seen first."""

    entry: LogPattern | None
    """What is known about it; None when nothing is."""
    rank: int | None
    """The rank that said it, where that is known."""
    host: str
    """Its machine, where that is known."""
    log: str
    line: int
    evidence: str
    time: str = ""
    """The time in the line, where there is one."""
    count: int = 1
    """How often this rank said it."""

    @property
    def weight(self) -> int:
        """The smaller, the likelier it is the cause."""
        if self.entry is None:
            return UNKNOWN
        return _WEIGHTS.get(self.entry.role, 3)


@dataclass(kw_only=True)
class Communicator:
    """A group of ranks, as its members' logs show it."""

    ranks: int
    """How many members it has."""
    began: set[int] = field(default_factory=set)
    """Members whose log shows that they began to join."""
    complete: set[int] = field(default_factory=set)
    """Members whose log shows that they have joined."""
    hosts: dict[int, str] = field(default_factory=dict)
    """Member -> machine."""
    pairs: dict[tuple[int, int], str] = field(default_factory=dict)
    """From and to -> transport."""
    details: dict[str, int] = field(default_factory=dict)
    """Transport, as exactly as NCCL names it -> how many lines."""
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Channel -> the order of the ring."""
    parents: dict[int, int] = field(default_factory=dict)
    """Member -> its parent in the first tree, -1 for the root."""
    trees: int = 0
    """How many trees."""
    channels: tuple[int, int] | None = None
    """Channels for collectives, and for sends between two ranks."""


@dataclass(kw_only=True)
class LogSummary:
    """What was read."""

    versions: dict[str, set[int | str]] = field(default_factory=dict)
    """NCCL's version -> who has it: ranks, or processes whose rank is not known."""
    drivers: set[str] = field(default_factory=set)
    """The newest CUDA that the nodes' drivers support."""
    processes: int = 0
    """Processes that wrote."""
    communicators: list[Communicator] = field(default_factory=list)
    """All groups, the largest first."""
    interfaces: dict[str, set[str]] = field(default_factory=dict)
    """Machine -> the interfaces it meets the others on, with their addresses."""
    cards: dict[str, set[str]] = field(default_factory=dict)
    """Machine -> its InfiniBand or RoCE ports."""
    networks: set[str] = field(default_factory=set)
    """What NCCL chose between nodes: "IB", "Socket", …"""
    settings: dict[str, dict[str, set[int | str]]] = field(default_factory=dict)
    """Variable -> value -> who has it."""
    problems: list[Problem] = field(default_factory=list)
    """What went wrong, the likeliest cause first."""
    waiting: Waiting = field(default_factory=Waiting)
    """How far each rank had come when torch's watchdog gave up."""
    seen: set[int] = field(default_factory=set)
    """The ranks that the job is known to have."""
    failed: bool = False
    """Whether NCCL shows a call that failed."""
    lines: int = 0
    """Lines that say something about NCCL."""
    dropped: int = 0
    """Facts and problems beyond what is kept."""

    @property
    def world(self) -> Communicator | None:
        """The largest group."""
        return self.communicators[0] if self.communicators else None
