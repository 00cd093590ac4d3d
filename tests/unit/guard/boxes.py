"""Black boxes made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.blackbox.snapshot import Op, Raw, Snapshot

NOW = 1000.0
GATHER = ("gather", "train.py:30")
BACKWARD = ("backward", "train.py:20")
BARRIER = ("barrier", "train.py:40")


def box(
    rank: int, calls: Sequence[tuple[str, ...]] = (), *, waits: float | None = None, world: int = 2, **more: Any
) -> Snapshot:
    """A rank that has made these calls (name, site, signature); with ``waits``, it is in the last one for so long."""
    ops = [
        Op(seq=number, name=name, site=site, signature="".join(rest), since=NOW - 500)
        for number, (name, site, *rest) in enumerate(calls, 1)
    ]
    inside = None
    if waits is not None:
        inside = ops[-1] = Op(
            seq=ops[-1].seq, name=ops[-1].name, site=ops[-1].site, signature=ops[-1].signature, since=NOW - waits
        )
    left = len(ops) - (inside is not None)
    return Snapshot(
        **{
            "rank": rank,
            "world_size": world,
            "entered": len(ops),
            "left": left,
            "op": inside,
            "history": tuple(ops[-64:]),
            "now": NOW,
            **more,
        }
    )


def raw(name: str, *, waits: float = 5.0, **more: Any) -> Raw:
    return Raw(**{"name": name, "site": "train.py:50", "since": NOW - waits, **more})
