"""What the guard found out, as a value; ``explain`` makes a text of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RankLocation:
    """Ranks that are at the same point."""

    ranks: tuple[int, ...]
    doing: str
    """What they do there: "wait in gather", "are in time.sleep", "have finished", "were killed"."""
    site: str = ""
    detail: str = ""
    """More: shapes and dtypes, the exception, how long."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One finding for the whole job."""

    kind: str
    """ "different ops", "different arguments", "gone", "missing", "raw", "all wait": what was recognised."""
    certain: bool
    """Whether nothing can end it: then the job is stopped. Otherwise it is only told."""
    headline: str
    """In one sentence."""
    waiting: tuple[RankLocation, ...] = ()
    """Who waits, and where."""
    missing: tuple[RankLocation, ...] = ()
    """Who is waited for, and where that is."""
    apart: tuple[RankLocation, ...] = ()
    """Where the ranks were when they first made one call at different lines, if they have ever since: no proof."""
    together: str = ""
    """The last point at which all were."""
    cause: str = ""
    """What it most likely comes from."""
    fix: str = ""
    lead: str = ""
    """The rank that strayed, and where, if that is known: it stands first, as others only noticed."""
    recorded: bool = False
    """Whether the boxes themselves show the cause: then the script is not searched for one."""
    seconds: float = 0.0
    """How long the first has waited."""
    stacks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Stacks of some ranks."""

    def to_dict(self) -> dict[str, Any]:
        """For diagnosis.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Diagnosis:
        """The same again."""
        places = {
            name: tuple(RankLocation(**{**place, "ranks": tuple(place["ranks"])}) for place in fields[name])
            for name in ("waiting", "missing", "apart")
        }
        stacks = {int(rank): tuple(lines) for rank, lines in fields["stacks"].items()}
        return cls(**{**fields, **places, "stacks": stacks})
