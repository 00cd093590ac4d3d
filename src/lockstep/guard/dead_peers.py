"""Ranks of this node whose process ended without a report: what a rank that survives them can report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.blackbox import read
from lockstep.blackbox.snapshot import Snapshot
from lockstep.guard import stack_note
from lockstep.guard.crash import different_calls
from lockstep.guard.diagnosis import RankLocation
from lockstep.guard.rank_location import RANGES, at, last_steps
from lockstep.guard.remedies import KILLED, ended_rank_cause
from lockstep.rundir.crash_report import Advice
from lockstep.rundir.format_ranks import name_ranks

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


def advise_on_left(left: Sequence[Snapshot], doing: str = "") -> Advice:
    """Who came to the end of the script while others wait, what it did last, the likely cause, and what to do."""
    words = sorted({box.words for box in left if box.words})
    place = RankLocation(ranks=tuple(box.rank for box in left), doing="have finished", detail="; ".join(words))
    why = ended_rank_cause(place, [RankLocation(ranks=(), doing=doing)])
    who = name_ranks(place.ranks, RANGES)
    note = f" ({place.detail})" if place.detail else ""
    last = left[0].history[-1] if left[0].history else None
    after = f" after {at(last)}" if last is not None else ""
    return Advice(
        lead=f"{who[:1].upper()}{who[1:]} reached the end of the script{after}{note}, while the others waited for "
        f"{'it' if len(left) == 1 else 'them'}.",
        cause=why.cause,
        fix=why.fix,
    )


def advise_on_dead(dead: Sequence[Snapshot], boxes: Path | None) -> Advice:
    """Who died, what each was doing, what to do. Others see no exit code, but the stack of a crash."""
    everyone = read.read_all(boxes) if boxes is not None else []
    sentences = []
    clash = None
    for box in dead[:_MOST]:
        who = f"Rank {box.rank} on {box.host} (pid {box.pid})"
        how = f"crashed in native code ({box.crash})" if box.crash else "died without an exception"
        sentences.append(f"{who} {how}. {last_steps(box)}")
        clash = clash or different_calls(box, everyone)
    if len(dead) > _MOST:
        sentences.append(f"{len(dead) - _MOST} more ranks died.")
    lead, details = sentences[0], "\n".join(sentences[1:])
    if clash is not None:
        return Advice(
            lead=lead, details="\n".join(filter(None, [clash.details, details])), cause=clash.cause, fix=clash.fix
        )
    if all(box.crash for box in dead):
        return Advice(lead=lead, details=details)
    return Advice(
        lead=lead, details=details, cause="Killed, or ended by os._exit() or a crash in native code.", fix=KILLED
    )
