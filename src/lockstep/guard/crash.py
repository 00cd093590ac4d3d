"""A rank that a crash in native code ended: where it was, and the collective of another rank that it may have met.

Python's faulthandler writes the stacks of a process that gets SIGABRT, SIGSEGV, SIGBUS, SIGFPE or SIGILL into the file
that `lockstep stacks` uses. Calls of torch.distributed are found there: nothing else records them so early.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.blackbox.snapshot import Snapshot
from lockstep.guard.rank_location import RANGES, at, label, torch_call, user_frames
from lockstep.guard.source import read_lines
from lockstep.rundir.constants import stack_file
from lockstep.rundir.crash_report import Advice
from lockstep.rundir.format_ranks import name_ranks
from lockstep.rundir.regular_file import open_regular

ABORTED = "Aborted"
"""How faulthandler reports SIGABRT."""
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_HEADING = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.*:$")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_STARTERS = re.compile(r"^<frozen runpy>$|/lockstep/launch/worker\.py$|/runpy\.py$")
_LARGEST = 1 << 20
"""Bytes at the end of the file that are read."""


@dataclass(frozen=True, kw_only=True)
class StackFrame:
    """One line of a stack."""

    file: str
    line: int
    """0 when it is not known."""
    function: str


def main_stack(text: str) -> tuple[StackFrame, ...]:
    """The main thread's frames, innermost last, of what faulthandler wrote."""
    threads: list[list[StackFrame]] = []
    main = -1  # it lists that thread as the last one
    lines = text.splitlines()
    for line in lines:
        if heading := _HEADING.match(line):
            threads.append([])
            if heading[1] == "Current thread" and "..." in lines:
                # Too many threads to list them all; the main one is the one that Linux prefers to give the signal to.
                main = len(threads) - 1
        elif threads and (frame := _FRAME.match(line)):
            number = int(frame[2]) if frame[2].isdecimal() else 0
            threads[-1].append(StackFrame(file=frame[1], line=number, function=frame[3]))
    frames = threads[main][::-1] if threads else []
    while len(frames) > 1 and _STARTERS.search(frames[0].file):
        del frames[0]
    return tuple(frames)


def format_stack(stack: Sequence[StackFrame]) -> list[str]:
    """Frames as in a traceback, with their source where it can be read."""
    lines = []
    for frame in stack:
        lines.append(f'  File "{frame.file}", line {frame.line or "?"}, in {frame.function}')
        source = read_lines(frame.file)[frame.line - 1 : frame.line] if frame.line else ()
        lines += [f"    {line.strip()}" for line in source if line.strip()]
    return lines


@dataclass(frozen=True, kw_only=True)
class Crash:
    """The fatal error in native code that ended a process."""

    kind: str
    """As faulthandler names it: "Aborted", "Segmentation fault"."""
    stack: tuple[StackFrame, ...]
    """The main thread's frames, innermost last."""


def read_crash(stacks: Path, rank: int) -> Crash | None:
    """What faulthandler wrote when the latest process of a rank crashed; None where it wrote nothing."""
    text = _read_end(stacks / stack_file(rank))
    found = list(_FATAL.finditer(text))
    return Crash(kind=found[-1][1], stack=main_stack(text[found[-1].end() :])) if found else None


def with_crash(box: Snapshot, stacks: Path) -> Snapshot:
    """The snapshot of a rank that has died, with its crash and stack, if faulthandler wrote them."""
    crash = read_crash(stacks, box.rank)
    if crash is None:
        return box
    stack = tuple(f"{frame.file}:{frame.line} in {frame.function}" for frame in reversed(crash.stack))
    return replace(box, crash=crash.kind, stack=stack)


def _read_end(path: Path) -> str:
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - _LARGEST))
            return file.read(_LARGEST).decode(errors="replace")
    except OSError:
        return ""


def different_calls(box: Snapshot, everyone: Sequence[Snapshot]) -> Advice | None:
    """What explains an abort inside a collective: ranks that were in another one. None where none was seen there."""
    mine = _collective(box)
    if box.crash != ABORTED or mine is None:
        return None
    elsewhere: dict[str, list[int]] = {}
    for other in everyone:
        theirs = _collective(other)
        same_group = (box.attempt, box.generation) == (other.attempt, other.generation)
        if other.rank != box.rank and same_group and theirs is not None and theirs[0] != mine[0]:
            elsewhere.setdefault(theirs[1], []).append(other.rank)
    if not elsewhere:
        return None
    places = "; ".join(
        f"{name_ranks(ranks, RANGES)} {'was' if len(ranks) == 1 else 'were'} in {where}"
        for where, ranks in elsewhere.items()
    )
    return Advice(
        details=f"At that moment {places}.",
        cause=f"The ranks made different collective calls. Rank {box.rank} received data of another size than its own "
        "call expects; gloo aborts the process then.",
        fix="Make the same calls of torch.distributed and of Lockstep on every rank, in the same order.",
    )


def _collective(box: Snapshot) -> tuple[str, str] | None:
    """The collective that a rank is in, or was in when it died: its name and number, and the same with its line."""
    if box.op is not None:
        return label(box.op), at(box.op)
    name, frames = torch_call(box.stack), user_frames(box.stack)
    return (name, f"torch's {name} at {frames[0][0]}") if name and frames else None
