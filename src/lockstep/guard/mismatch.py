"""The error for a rank that enters a collective by whose number another rank of its machine means a different one.

Each rank writes what it is about to do and then reads what its peers have written (``Box.enter``); the last of two that
differ sees it, and raises before any data moves. Ranks of other machines cannot be seen like this: there it is debug
mode that compares before, and the guard that finds a difference after.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.blackbox.peers import box_path
from lockstep.blackbox.read import read_all, read_box
from lockstep.blackbox.snapshot import Op
from lockstep.errors import DistributedOperationException
from lockstep.guard.diagnose import diagnose
from lockstep.guard.diagnosis import Diagnosis
from lockstep.guard.rank_location import RANGES
from lockstep.guard.remedies import CauseAndFix, title_of, what_differs
from lockstep.guard.render import understand
from lockstep.rundir.code_frames import shorten
from lockstep.rundir.format_ranks import name_ranks


def mismatch(folder: Path, rank: int, number: int, other: int) -> DistributedOperationException:
    """The error in the form of the guides, with what both ranks entered."""
    boxes = read_all(folder)
    mine = next((box for box in boxes if box.rank == rank and box.pid == os.getpid()), None)
    # Another job may have been given the same run directory.
    job = [box for box in boxes if mine is not None and box.attempt == mine.attempt]
    ops = {box.rank: op for box in job for op in box.history if op.seq == number and box.rank in (rank, other)}
    if len(ops) < 2:
        return DistributedOperationException(
            f"Rank {rank} and rank {other} have entered collective number {number} with different arguments."
        )
    lines = [_headline(ops[rank], ops[other]), ""]
    names = sorted({op.name for op in ops.values()})
    lines.append(f"Operation: `{' / '.join(f'lockstep.{name}' for name in names)}`")
    lines.append(f"{title_of([op.signature for op in ops.values()])}:")
    lines += [f"  - Process {who}: {_arguments(op, names)}" for who, op in sorted(ops.items())]
    lines.append("Called at:")
    lines += [f"  - Process {who}: {op.name} at {op.site}" for who, op in sorted(ops.items())]
    found = diagnose(job, blocked_for=0.0)
    places = {who: (op.name, op.site) for who, op in ops.items()}
    summary = summarize(places, "" if len(names) > 1 else what_differs([op.signature for op in ops.values()]))
    return refusal(lines, None if found is None else understand(found), summary)


def entered(folder: Path, rank: int, number: int) -> str:
    """The name of the collective that a rank of this node has entered by this number; empty when that is past."""
    box = read_box(box_path(folder, rank))
    return next((op.name for op in box.history if op.seq == number), "") if box is not None else ""


def understand_boxes(folder: Path | None, rank: int) -> Diagnosis | None:
    """What the boxes of this node and the script show of ranks that have all entered a collective, and differ."""
    boxes = [] if folder is None else read_all(folder)
    mine = next((box for box in boxes if box.rank == rank and box.pid == os.getpid()), None)
    found = diagnose([box for box in boxes if mine is not None and box.attempt == mine.attempt], blocked_for=0.0)
    return None if found is None or not found.kind.startswith("different") else understand(found)


def summarize(calls: Mapping[int, tuple[str, str]], what: str) -> str:
    """Where no rank is known to have strayed: who called what, in a sentence. ``calls``: rank -> operation and line."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, call in sorted(calls.items()):
        groups.setdefault(call, []).append(rank)
    if len(groups) == 1:
        ((name, site),) = groups
        where = f" at {shorten(site)}" if site else ""
        return f"{_sentence(name_ranks(calls, RANGES))} called {name}{where} with different {what or 'arguments'}."
    parts = [
        f"{name_ranks(ranks, RANGES)} called {name}{f' at {shorten(site)}' if site else ''}"
        for (name, site), ranks in groups.items()
    ]
    more = f", with different {what}" if what else ""
    return f"{_sentence('; '.join(parts[:3]))}{'; …' if len(parts) > 3 else ''}{more}."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def refusal(
    lines: Sequence[str], why: Diagnosis | CauseAndFix | None, summary: str = ""
) -> DistributedOperationException:
    """The error of these lines with cause and fix below, and above them the rank that strayed, where it is known."""
    below = ["", f"Likely cause: {why.cause}", f"Fix: {why.fix}"] if why is not None and why.cause else []
    lead = "" if why is None else why.lead
    error = DistributedOperationException("\n".join(["", "", *([lead] if lead else []), *lines, *below]))
    error.lead, error.cause, error.fix = lead or summary, *(("", "") if why is None else (why.cause, why.fix))
    return error


def _arguments(op: Op, names: list[str]) -> str:
    # How many steps came before a backward is no argument of it.
    return op.signature if op.signature and (op.name != "backward" or len(names) == 1) else "no tensors"


def _headline(mine: Op, theirs: Op) -> str:
    if mine.name != theirs.name:
        return "Cannot apply desired operation because the processes called different operations."
    if mine.name == "backward":
        return (
            "Cannot reduce gradients because optimizers have made more steps on some processes: the weights are no "
            "longer the same on all of them."
        )
    what = what_differs([mine.signature, theirs.signature])
    if what == "dtypes":
        return "Cannot apply desired operation due to dtype mismatches. All dtypes across devices must be the same."
    if what == "structures":
        return "Cannot apply desired operation because its arguments differ between the processes."
    return "Cannot apply desired operation due to shape mismatches. All shapes across devices must be valid."
