"""``lockstep watch``: a table of what every rank is doing, while it is doing it. Only files are read; torch is not."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from lockstep.blackbox import read
from lockstep.blackbox.snapshot import Snapshot
from lockstep.config import env
from lockstep.errors import ConfigError
from lockstep.guard import stack_note
from lockstep.guard.rank_location import ending, label, locate, raw_name, span
from lockstep.guard.watcher import together
from lockstep.rundir import constants, layout
from lockstep.rundir.format_ranks import name_ranks
from lockstep.rundir.layout import RunDirectory
from lockstep.rundir.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

BLOCKED = 5.0
"""Seconds in one collective after which a rank is shown as blocked, if others are elsewhere."""
_INTERVAL = 0.5
_WINDOW = 10
"""Looks over which steps per second are taken."""
_AFTERWARDS = 10.0
"""Seconds that a launcher may take to start ranks again before their end counts as the job's."""
_STYLES = {"blocked": "red", "failed": "bold red", "dead": "bold red", "finished": "dim", "paused": "yellow"}


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank in the table."""

    rank: int
    host: str
    pid: int
    state: str
    """ "running", "blocked", "paused", "finished", "failed" or "dead"."""
    step: int
    """Updates made."""
    doing: str
    """What it is in: a collective, a phase, or how it ended."""
    site: str
    seconds: float | None
    """For how long, where that is known."""
    steps_per_second: float | None = None
    """Updates per second, from two looks."""
    memory_bytes: int | None = None
    """Resident memory; of this machine's ranks only."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument(
        "run", metavar="RUN_DIR", nargs="?", help="a run directory or a run's name; the latest run without it"
    )
    parser.add_argument("--once", action="store_true", help="print the table once and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object and end")


def run(arguments: argparse.Namespace) -> int:
    """Show the ranks until they have gone, or once."""
    directory = layout.find(arguments.run, asked=env.snapshot().get(constants.VARIABLE))
    try:
        if arguments.once or arguments.json or not sys.stdout.isatty():
            _show_once(directory, arguments.json)
        else:
            _follow(directory)
    except KeyboardInterrupt:
        pass  # the way to end it
    return 0


# ---------------------------------------------------------------- looking


def read_ranks(directory: RunDirectory) -> list[Snapshot]:
    """The ranks of a run as they are now, with what their reporters add."""
    boxes = together(read.read_all(directory.boxes))
    here = os.uname().nodename
    return [
        # Clocks of two nodes have nothing in common: there, "now" is when its own reporter last looked up.
        stack_note.merged(
            box if box.host == here else replace(box, now=box.beat), stack_note.place(directory.boxes, box.rank)
        )
        for box in boxes
    ]


def require(directory: RunDirectory) -> list[Snapshot]:
    """The ranks of a run; ConfigError when none has left a black box."""
    boxes = read_ranks(directory)
    if not boxes:
        raise ConfigError(
            f"No rank of the run {directory.path} has a black box. A rank has one from the moment it makes its "
            "Accelerator, and a job of one process has none (`lockstep stacks PID` asks that one). If the job is past "
            "that, this is not its run directory: name the right one."
        )
    return boxes


def where(box: Snapshot) -> tuple[str, str, float | None]:
    """What a rank is in or how it ended, the user's line, and seconds since it is there."""
    if not box.alive or box.closed:
        doing, words = ending(box)
        if doing.startswith("have exited"):
            doing = "has died"
        return _one(doing) + (f": {words}" if words else ""), "", None
    if box.op is not None:
        return f"in {label(box.op)}", box.op.site, _since(box, box.op.since)
    doing, site, _ = locate(box)
    if box.raw is not None and doing.startswith("wait in"):
        return f"in torch's {raw_name(box.raw.name)}", site, _since(box, box.raw.since)
    return _one(doing), site, _since(box, box.phase_since)


def _one(doing: str) -> str:
    """What is said of many ranks, of one."""
    verb, _, rest = doing.partition(" ")
    return {"are": rest, "wait": rest, "have": f"has {rest}", "were": f"was {rest}"}.get(verb, doing)


def _since(box: Snapshot, since: float) -> float | None:
    return max(0.0, box.now - since) if since else None


def rates(before: Iterable[Snapshot], after: Iterable[Snapshot]) -> dict[int, float]:
    """Steps per second of the ranks that are the same processes in both looks."""
    earlier = {(box.rank, box.pid, box.attempt): box for box in before}
    found = {}
    for box in after:
        old = earlier.get((box.rank, box.pid, box.attempt))
        if old is not None and box.now > old.now:
            found[box.rank] = max(0, box.step - old.step) / (box.now - old.now)
    return found


def memory(boxes: Iterable[Snapshot]) -> dict[int, int]:
    """Resident bytes of this machine's living ranks."""
    import psutil

    here = os.uname().nodename
    found = {}
    for box in boxes:
        if box.alive and box.host == here:
            with suppress(psutil.Error):
                found[box.rank] = int(psutil.Process(box.pid).memory_info().rss)
    return found


# ---------------------------------------------------------------- what is shown


def rows(boxes: Sequence[Snapshot], speed: Mapping[int, float], resident: Mapping[int, int]) -> list[RankRow]:
    """The table as values."""
    made = []
    for box in boxes:
        doing, site, seconds = where(box)
        made.append(
            RankRow(
                rank=box.rank,
                host=box.host,
                pid=box.pid,
                state=_state(box, boxes),
                step=box.step,
                doing=doing,
                site=site,
                seconds=seconds,
                steps_per_second=speed.get(box.rank) if box.alive and not box.closed else None,
                memory_bytes=resident.get(box.rank),
            )
        )
    return made


def _state(box: Snapshot, boxes: Sequence[Snapshot]) -> str:
    if box.closed:
        return box.closed
    if not box.alive:
        return "dead"
    if box.paused:
        return "paused"
    inside = _inside(box)
    waited = where(box)[2]
    if inside is None or waited is None or waited <= BLOCKED:
        return "running"
    everybody = len(boxes) >= box.world_size
    return "running" if everybody and all(_inside(other) == inside for other in boxes) else "blocked"


def _inside(box: Snapshot) -> tuple[object, ...] | None:
    """The collective that a rank is in."""
    if not box.alive or box.closed:
        return None
    if box.op is not None:
        return box.generation, box.op.seq, box.op.name
    return None if box.raw is None else (box.raw.group, box.raw.number, box.raw.name)


def absent(boxes: Sequence[Snapshot]) -> str:
    """A sentence about ranks that have no box here; empty when all have one."""
    there = {box.rank for box in boxes}
    without = [rank for rank in range(max((box.world_size for box in boxes), default=0)) if rank not in there]
    if not without:
        return ""
    named = name_ranks(without, 8)
    return f"{named[0].upper()}{named[1:]}: no black box here; not started yet, or on nodes with a disk of their own."


def render(directory: RunDirectory, found: Sequence[RankRow], note: str = "") -> RenderableType:
    """The table for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(f"lockstep: {directory.path.name}")), title_justify="left")
    for heading, right in (("rank", True), ("host", False), ("step", True), ("in", False), ("for", True)):
        table.add_column(heading, justify="right" if right else "left", overflow="fold", no_wrap=heading == "for")
    for heading in ("steps/s", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        doing = f"{row.doing} at {row.site}" if row.site else row.doing
        if row.state == "blocked":
            doing += " (blocked)"
        elif row.state == "paused" and "paused" not in doing:
            doing += " (paused)"
        cells = (
            str(row.rank),
            row.host,
            str(row.step),
            doing,
            "" if row.seconds is None else span(row.seconds),
            "" if row.steps_per_second is None else f"{row.steps_per_second:.2f}",
            "" if row.memory_bytes is None else _size(row.memory_bytes),
        )
        table.add_row(*(Text(printable(cell)) for cell in cells), style=_STYLES.get(row.state))
    return Group(table, Text(printable(note))) if note else table


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


# ---------------------------------------------------------------- the two ways


def _show_once(directory: RunDirectory, as_json: bool) -> None:
    before = require(directory)
    if any(box.alive and not box.closed for box in before):
        time.sleep(_INTERVAL)  # steps per second need a second look
    boxes = read_ranks(directory) or before
    found = rows(boxes, rates(before, boxes), memory(boxes))
    if as_json:
        report = {"run": str(directory.path), "ranks": [asdict(row) for row in found], "note": absent(boxes)}
        print(json.dumps(report, indent=1))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(render(directory, found, absent(boxes)))


def _follow(directory: RunDirectory) -> None:
    from rich.live import Live

    looks: deque[list[Snapshot]] = deque(maxlen=_WINDOW)
    ended: float | None = None
    if not layout.is_running(directory.path):
        require(directory)
    with Live(auto_refresh=False) as live:
        while True:
            boxes = read_ranks(directory)
            looks.append(boxes)
            note = absent(boxes) if boxes else "No rank has created its Accelerator yet."
            live.update(render(directory, rows(boxes, rates(looks[0], boxes), memory(boxes)), note), refresh=True)
            if not any(_is_there(box) for box in boxes):
                # A launcher that lives may start them again.
                ended = ended or time.monotonic()
                if not layout.is_running(directory.path) or (boxes and time.monotonic() - ended > _AFTERWARDS):
                    return
            else:
                ended = None
            time.sleep(_INTERVAL)


def _is_there(box: Snapshot) -> bool:
    """Whether a rank may still do something; of another node's process it is only known how it left the job."""
    return box.alive and not (box.closed and box.host != os.uname().nodename)
