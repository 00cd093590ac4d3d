"""Ranks of this node whose process ended without a word: what a rank that survives them can report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.blackbox import read
from lockstep.blackbox.snapshot import Snapshot
from lockstep.guard import side
from lockstep.guard.causes import KILLED
from lockstep.guard.whereabouts import last_steps

_MOST = 4
"""Dead ranks that are described."""


def find_dead(boxes: Path | None, rank: int) -> list[Snapshot]:
    """The boxes of ranks that have died in this session of the job, on the node of ``rank``, which is this process."""
    found = read.read_all(boxes) if boxes is not None else []
    mine = next((box for box in found if box.rank == rank and box.pid == os.getpid()), None)
    if boxes is None or mine is None:
        return []
    dead = [box for box in found if box.attempt == mine.attempt and not (box.alive or box.closed)]
    return [side.merged(box, side.place(boxes, box.rank)) for box in dead]


def describe(dead: Sequence[Snapshot]) -> str:
    """In sentences: who died, what each was doing, what to do. Another process cannot see how it ended."""
    lines = [
        f"Rank {box.rank} on {box.host} (pid {box.pid}) died without an exception: killed, or ended by os._exit or a "
        f"crash in native code. {last_steps(box)}"
        for box in dead[:_MOST]
    ]
    more = [f"{len(dead) - _MOST} more ranks died."] if len(dead) > _MOST else []
    return "\n".join([*lines, *more, KILLED])
