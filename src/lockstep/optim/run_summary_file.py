"""The file in the project directory that remembers how the last run was set up."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.host.atomic_file import replacing
from lockstep.optim.run_summary import RunSummary, compare
from lockstep.rundir.regular_file import read_json

NAME = "lockstep_run.json"
_LARGEST = 1 << 20


def write_summary(project_dir: str, record: RunSummary) -> list[str]:
    """Called on: the main process. Put the record in the place of the last run's; gives what is worth a warning.

    Never raises for a file that cannot be read or written: a training must not end because of its records.
    """
    path = Path(project_dir, NAME)
    said = []
    try:
        before = _read(path)
    except (OSError, ValueError) as error:
        said.append(f"{path} cannot be read ({error}), so this run is not compared with the one before.")
    else:
        difference = None if before is None else compare(before, record)
        said += [] if difference is None else [difference]
    try:
        _write(path, record)
    except OSError as error:
        said.append(f"{path} cannot be written ({error}): the next run here will not be compared with this one.")
    return said


def _read(path: Path) -> RunSummary | None:
    try:
        return RunSummary.from_dict(read_json(path, limit=_LARGEST))
    except FileNotFoundError:
        return None


def _write(path: Path, record: RunSummary) -> None:
    """The whole file or nothing: whoever reads meanwhile sees the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        Path(draft).write_text(json.dumps(record.to_dict(), indent=2) + "\n", encoding="utf-8")
