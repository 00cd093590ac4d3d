"""``lockstep stacks``: where every rank of a running job is, down to the Python line, without stopping it.

Each rank has Python's faulthandler listen for SIGUSR2, which writes the stacks of its threads into the run directory
even while its main thread is in C++. A process that does not listen would be ended by that signal: it gets none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lockstep.blackbox import layout, processes, read
from lockstep.blackbox.peers import box_path
from lockstep.blackbox.snapshot import Snapshot
from lockstep.cli import watch
from lockstep.config import env
from lockstep.errors import ConfigError
from lockstep.guard.crash import StackFrame, format_stack, main_stack
from lockstep.guard.rank_location import span
from lockstep.rundir import constants
from lockstep.rundir.layout import RunDirectory, find
from lockstep.rundir.printable import printable
from lockstep.rundir.regular_file import open_regular

LIMIT = 3.0
"""Seconds that the ranks have to write."""
_QUIET = 0.2
"""Seconds without growth after which a file counts as written."""
_LARGEST_PID = 1 << 22
_LARGEST = 1 << 22
"""Bytes of stacks that are read."""


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """One rank, and what it told."""

    rank: int
    pid: int
    host: str = ""
    doing: str = ""
    """What its black box says it is in."""
    site: str = ""
    """The user's line of that."""
    seconds: float | None = None
    """For how long."""
    stack: tuple[StackFrame, ...] = field(default=())
    """The main thread's frames, innermost last."""
    problem: str = ""
    """Why there is no stack."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument(
        "run",
        metavar="RUN_DIR | PID",
        nargs="?",
        help="a run directory, a run's name, or the process number of one rank; the latest run without it",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Ask the ranks, and print what they wrote; 1 when none has given a stack."""
    if arguments.run and _is_pid(arguments.run):
        directory, boxes = _of_process(int(arguments.run))
    else:
        directory = find(arguments.run, asked=env.snapshot().get(constants.VARIABLE))
        boxes = watch.require(directory)
    found = request_stacks(directory, boxes)
    if arguments.json:
        print(json.dumps({"run": str(directory.path), "ranks": [asdict(one) for one in found]}, indent=1))
    else:
        print("\n\n".join(show(one) for one in found))
        if not arguments.run or not _is_pid(arguments.run):
            note = watch.absent(boxes)
            print(f"\n{printable(note)}" if note else "", end="\n" if note else "")
    return 0 if any(one.stack for one in found) else 1


# ---------------------------------------------------------------- whom to ask


def _is_pid(text: str) -> bool:
    """A number is a process, unless there is a folder of that name; the date in a run's name is larger than any."""
    return text.isdecimal() and 0 < int(text) < _LARGEST_PID and not os.path.isdir(text)


def _of_process(pid: int) -> tuple[RunDirectory, list[Snapshot]]:
    """The run that a process belongs to, and its box in it."""
    environ = processes.environ_of(pid)
    named = _run_of(pid, environ)
    if named is not None and os.path.isdir(named):
        directory = RunDirectory(path=Path(named))
        boxes = [box for box in watch.read_ranks(directory) if box.pid == pid]
        # Before its Accelerator is made a rank has no box, but it listens already.
        rank = constants.rank_in(environ)
        return directory, boxes or [Snapshot(rank=rank, world_size=1, host=os.uname().nodename, pid=pid)]
    for folder in sorted(Path(os.path.abspath(".lockstep/runs")).glob("*"), reverse=True):
        if not folder.is_symlink():
            directory = RunDirectory(path=folder)
            boxes = [box for box in watch.read_ranks(directory) if box.pid == pid and box.alive]
            if boxes:
                return directory, boxes
    seen = "its environment does not name a run directory" if processes.started(pid) else "there is no such process"
    raise ConfigError(
        f"Process {pid} is not a rank of a known job: {seen}, and no black box under "
        f"{os.path.abspath('.lockstep/runs')} belongs to it. Name the run directory instead."
    )


def _run_of(pid: int, environ: Mapping[str, str]) -> str | None:
    """The run directory in a process's environment."""
    named = environ.get(constants.VARIABLE)
    if not named:
        return None
    try:
        return os.path.realpath(os.path.join(os.readlink(f"/proc/{pid}/cwd"), named))
    except OSError:
        return None


def refusal(directory: RunDirectory, box: Snapshot) -> str:
    """Why a rank must not be sent the signal; empty when it may be."""
    if not box.alive:
        return "no stack: the process has ended"
    header = read.read_header(box_path(directory.boxes, box.rank))
    if header is not None and header.pid == box.pid:
        if header.machine != layout.this_machine():
            return f"no stack: it is on another node; run `lockstep stacks` on {box.host or 'that one'}"
        if not processes.find_process(box.pid, header.started).alive:
            return "no stack: the process has ended"
    if not _listens(box.pid, directory.stack(box.rank)):
        return "no stack: not asked, because it does not listen for SIGUSR2, which would end it"
    return ""


def _listens(pid: int, file: Path) -> bool:
    """Whether a process has a handler for SIGUSR2, and holds the file open that ours writes to.

    A handler alone could be the script's own: clusters use this signal to announce the end of a job's time.
    """
    try:
        status = Path("/proc", str(pid), "status").read_text(encoding="utf-8", errors="replace")
        caught = int(re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)[1], 16)  # type: ignore[index]
        if not caught >> (signal.SIGUSR2 - 1) & 1:
            return False
        wanted = file.stat()
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), wanted):
                    return True
    except (OSError, TypeError):
        pass
    return False


# ---------------------------------------------------------------- asking


def request_stacks(directory: RunDirectory, boxes: Sequence[Snapshot]) -> list[RankStack]:
    """Signal the ranks that listen, and collect what they write."""
    problems: dict[int, str] = {}
    before: dict[int, int] = {}
    for box in boxes:
        problems[box.rank] = _send(directory, box, before)
    _wait({directory.stack(rank): size for rank, size in before.items()})
    found = []
    for box in boxes:
        stack: tuple[StackFrame, ...] = ()
        problem = problems[box.rank]
        if not problem:
            stack = main_stack(_read(directory.stack(box.rank), before[box.rank]))
            if not stack:
                why = " (it is paused, by a debugger or a signal)" if box.paused else ""
                problem = f"no stack: it was asked, and wrote none within {LIMIT:.0f} s{why}"
        doing, site, seconds = watch.where(box)
        found.append(
            RankStack(
                rank=box.rank,
                pid=box.pid,
                host=box.host,
                doing=doing,
                site=site,
                seconds=seconds,
                stack=stack,
                problem=problem,
            )
        )
    return found


def _send(directory: RunDirectory, box: Snapshot, before: dict[int, int]) -> str:
    """Signal one rank, and note how long its file was; else why not."""
    if box.pid <= 0:
        return "no stack: its process is not known"
    try:
        # Held first and looked at then: the signal reaches the process that was looked at, or none.
        process = os.pidfd_open(box.pid)
    except ProcessLookupError:
        return "no stack: the process has ended"
    except OSError as error:
        return f"no stack: the process cannot be reached ({error.strerror})"
    try:
        problem = refusal(directory, box)
        if not problem:
            before[box.rank] = _length(directory.stack(box.rank))
            signal.pidfd_send_signal(process, signal.SIGUSR2)
        return problem
    except OSError as error:
        before.pop(box.rank, None)
        return f"no stack: it could not be asked ({error.strerror})"
    finally:
        os.close(process)


def _wait(files: Mapping[Path, int]) -> None:
    """Until all files have grown and grow no more."""
    deadline = time.monotonic() + LIMIT
    sizes: dict[Path, int] = dict(files)
    changed = time.monotonic()
    while files and (now := time.monotonic()) < deadline:
        lengths = {path: _length(path) for path in files}
        if lengths != sizes:
            sizes, changed = lengths, now
        elif now - changed >= _QUIET and all(lengths[path] > size for path, size in files.items()):
            return
        time.sleep(0.02)


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, start: int) -> str:
    try:
        with open_regular(path) as file:
            file.seek(start)
            return file.read(_LARGEST).decode(errors="replace")
    except OSError:
        return ""


# ---------------------------------------------------------------- what they wrote


def show(found: RankStack) -> str:
    """One rank as text."""
    machine = f" on {found.host}" if found.host else ""
    line = f"rank {found.rank}{machine} (pid {found.pid}): {found.doing}"
    line += f" at {found.site}" if found.site else ""
    line += f" for {span(found.seconds)}" if found.seconds is not None else ""
    lines = [line]
    lines += format_stack(found.stack)
    if found.problem:
        lines.append(f"  {found.problem}")
    return printable("\n".join(lines))
