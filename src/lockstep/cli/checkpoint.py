"""``lockstep checkpoint``: which checkpoints there are, whether they are whole, deleting old ones. Without torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import discovery
from lockstep.checkpoint.prune import prune, surplus
from lockstep.cli import list_names
from lockstep.errors import ConfigError
from lockstep.rundir.printable import printable
from lockstep.storage import commit
from lockstep.storage.disk import Disk

_ACTIONS = {
    "ls": "list them, with their step, size and age",
    "verify": "read them through and compare every file with its hash; list files that are not part of them",
    "prune": "delete the oldest, and keep --keep of those that are whole",
}


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """One checkpoint."""

    path: str
    state: str
    """ "complete" or "damaged" (all files are there in their size, or not); after reading, "verified" or "damaged"."""
    updates: int | None
    """How far the run had come."""
    world_size: int | None
    """On how many processes."""
    bytes: int | None
    """Size of all files."""
    time: str | None
    """When it was saved, in UTC."""
    problems: list[str]
    additional: list[str]
    """After reading: files in its folder that are not part of it, and are never loaded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = list_names("actions", _ACTIONS)
    parser.add_argument("action", choices=list(_ACTIONS), help="one of those below")
    parser.add_argument(
        "folder", metavar="DIR", help="a checkpoint, a folder with checkpoint_N in it, or a project's folder"
    )
    parser.add_argument("--keep", type=int, metavar="N", help="how many prune keeps (at least 1)")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="have prune say what it would delete")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """List, verify or prune; 1 when something is damaged."""
    found, folder = _checkpoints(Path(arguments.folder))
    if arguments.action == "prune":
        return _prune(folder, arguments)
    rows = [_row(path, read=arguments.action == "verify") for path in found]
    if arguments.json:
        print(json.dumps([row.__dict__ for row in rows], indent=1))
    else:
        _print(rows)
    return 1 if any(row.problems for row in rows) else 0


def _checkpoints(place: Path) -> tuple[list[Path], Path]:
    """The checkpoints that are meant, the newest first, and the folder of numbered ones."""
    if not place.is_dir():
        raise ConfigError(f"{place} is not a folder. Name a checkpoint, or the folder that checkpoints are in.")
    for folder in (place, place / "checkpoints"):
        if commit.numbered(folder):
            return [path for _, path in commit.numbered(folder)], folder
    if discovery.inspect_folder(place).manifest is not None or any(place.iterdir()):
        return [place], place
    raise ConfigError(f"{place} is empty: there is no checkpoint in it.")


def _row(path: Path, *, read: bool) -> CheckpointRow:
    seen = discovery.inspect_folder(path)
    problems = discovery.verify(path) if read else [seen.problem] if seen.problem is not None else []
    about = {} if seen.manifest is None else seen.manifest.about
    good = "verified" if read else "complete"
    return CheckpointRow(
        path=str(path),
        state="damaged" if problems else good,
        updates=_whole(about.get("updates")),
        world_size=_whole(about.get("world_size")),
        bytes=None if seen.manifest is None else seen.manifest.size,
        time=about["time"] if isinstance(about.get("time"), str) else None,
        problems=problems,
        additional=discovery.additional(path) if read and seen.manifest is not None else [],
    )


def _prune(folder: Path, arguments: argparse.Namespace) -> int:
    keep = arguments.keep
    if keep is None or keep < 1:
        raise ConfigError(f"prune --keep {keep}: say how many checkpoints are kept, at least 1.")
    numbered = commit.numbered(folder)
    if not numbered:
        raise ConfigError(f"{folder} has no checkpoint_N in it, so there is nothing to prune.")
    if arguments.dry_run:
        gone = surplus(folder, keep)
    else:
        # Whoever writes there deletes by itself, and holds this lock while it does.
        with commit.locked(folder, Disk()):
            gone = prune(folder, keep, Disk())
    if arguments.json:
        print(json.dumps({"deleted": [str(path) for path in gone], "dry_run": arguments.dry_run}, indent=1))
    else:
        verb = "would delete" if arguments.dry_run else "deleted"
        for path in gone:
            print(printable(f"{verb} {path}"))
        left = len(numbered) - len(gone)
        print(f"{len(gone)} {'would be' if arguments.dry_run else ''} deleted, {left} left.".replace("  ", " "))
    return 0


def _print(rows: list[CheckpointRow]) -> None:
    from rich.console import Console  # loaded where it is used: JSON needs none of it
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("checkpoint", "state", "updates", "processes", "size", "saved"):
        table.add_column(heading, justify="right" if heading in ("updates", "processes", "size") else "left")
    for row in rows:
        size = "-" if row.bytes is None else _size(row.bytes)
        cells = [row.updates, row.world_size]
        table.add_row(
            Text(printable(os.path.basename(row.path))),
            row.state,
            *("-" if cell is None else str(cell) for cell in cells),
            size,
            Text(printable(row.time or "-")),
            style="red" if row.problems else None,
        )
    width = None if sys.stdout.isatty() else 120
    console = Console(width=width, highlight=False, soft_wrap=True)
    console.print(table)
    for row in rows:
        for problem in row.problems:
            console.print(Text(printable(f"{os.path.basename(row.path)}: {problem}")))
        if row.additional:
            shown = ", ".join(row.additional[:10])
            more = "" if len(row.additional) <= 10 else f" and {len(row.additional) - 10} more"
            count = f"{len(row.additional)} files are not part of it, and are never loaded"
            console.print(Text(printable(f"{os.path.basename(row.path)}: {count}: {shown}{more}")))


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
