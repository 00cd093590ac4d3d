"""Ranks of this node whose process ended without a word: what a rank that survives them can report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.blackbox import read
from lockstep.blackbox.snapshot import Snapshot
from lockstep.guard import stack_note
from lockstep.guard.crash import different_calls
from lockstep.guard.diagnosis import RankLocation
from lockstep.guard.rank_location import at, last_steps, state
from lockstep.guard.remedies import KILLED, ended_rank_cause

_MOST = 4
"""Dead ranks that are described."""


def find_dead(boxes: Path | None, rank: int) -> list[Snapshot]:
    """The boxes of ranks that have died in this session of the job, on the node of ``rank``, which is this process."""
    found = read.read_all(boxes) if boxes is not None else []
    mine = next((box for box in found if box.rank == rank and box.pid == os.getpid()), None)
    if boxes is None or mine is None:
        return []
    dead = [box for box in found if box.attempt == mine.attempt and not (box.alive or box.closed)]
    return [stack_note.merged(box, stack_note.place(boxes, box.rank)) for box in dead]


def find_left(boxes: Path | None, rank: int) -> list[Snapshot]:
    """The boxes of ranks of this node that came to the end of the script, and not to the collective ``rank`` is in."""
    found = read.read_all(boxes) if boxes is not None else []
    mine = next((box for box in found if box.rank == rank and box.pid == os.getpid()), None)
    if mine is None:
        return []
    same = [box for box in found if (box.attempt, box.generation) == (mine.attempt, mine.generation)]
    return [box for box in same if box.closed == "finished" and box.left < mine.entered]


def describe_left(left: Sequence[Snapshot], doing: str = "") -> str:
    """Who came to the end of the script while others wait, what it did last, the likely cause, and what to do."""
    words = sorted({box.words for box in left if box.words})
    place = RankLocation(ranks=tuple(box.rank for box in left), doing="have finished", detail="; ".join(words))
    why = ended_rank_cause(place, [RankLocation(ranks=(), doing=doing)])
    ended = f"{state(place)}{f' ({place.detail})' if place.detail else ''}"
    last = left[0].history[-1] if left[0].history else None
    after = f" Its last collective was {at(last)}." if last is not None else ""
    return f"{ended[:1].upper()}{ended[1:]}.{after}\n{why.cause}\n{why.fix}"


def describe(dead: Sequence[Snapshot], boxes: Path | None) -> str:
    """In sentences: who died, what each was doing, what to do. Others see no exit code, but the stack of a crash."""
    everyone = read.read_all(boxes) if boxes is not None else []
    lines = []
    for box in dead[:_MOST]:
        who = f"Rank {box.rank} on {box.host} (pid {box.pid})"
        if box.crash:
            how = f"was ended by a crash in native code ({box.crash})"
        else:
            how = "died without an exception: killed, or ended by os._exit or a crash in native code"
        lines += [f"{who} {how}. {last_steps(box)}", *filter(None, [different_calls(box, everyone)])]
    more = [f"{len(dead) - _MOST} more ranks died."] if len(dead) > _MOST else []
    return "\n".join([*lines, *more, *([] if all(box.crash for box in dead) else [KILLED])])
