"""What a rank's reporter leaves beside its black box: where its main thread is.

It is written only while the rank enters and leaves no collective, and counts only as long as it has not done so since,
nor begun another phase. The same goes for the collective of torch's own that the reporter has put into the box.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lockstep.blackbox.snapshot import Snapshot, TorchCall
from lockstep.guard.crash import with_crash
from lockstep.rundir import files
from lockstep.rundir.regular_file import read_json

_LARGEST = 1 << 20
"""Bytes of a note; a stack of a thousand frames has a tenth."""


def write(path: Path, mark: tuple[int, int, int], stack: tuple[str, ...], calls: tuple[TorchCall, ...] = ()) -> None:
    """Leave a note that holds while the rank's counters (generation, entered, left) are ``mark``."""
    said = {"mark": mark, "stack": stack, "time": time.monotonic(), "calls": [asdict(call) for call in calls]}
    with suppress(OSError):  # a full disk must not disturb the job
        files.replace(path, json.dumps(said).encode())


def merged(box: Snapshot, path: Path) -> Snapshot:
    """The snapshot with what the rank's reporter says, as far as it still holds."""
    try:
        said: dict[str, Any] = read_json(path, limit=_LARGEST)
        moved = tuple(said["mark"]) != (box.generation, box.entered, box.left)
        if not moved and said["time"] >= box.phase_since:
            calls = tuple(TorchCall(**call) for call in said.get("calls", ()))
            return replace(box, stack=tuple(map(str, said["stack"])), torch_calls=calls)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    box = replace(box, raw=None)
    return box if box.alive or box.closed else with_crash(box, path.parents[1] / "stacks")


def place(boxes: Path, rank: int) -> Path:
    """Where the note of a rank lies."""
    return boxes / f"rank_{rank}.side.json"
