"""What a rank's reporter leaves beside its black box: where its main thread is.

It is written only while the rank enters and leaves no collective, and counts only as long as it has not done so since,
nor begun another phase. The same goes for the collective of torch's own that the reporter has put into the box.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.blackbox.snapshot import Snapshot


def write(path: Path, mark: tuple[int, int, int], stack: tuple[str, ...]) -> None:
    """Leave a note that holds while the rank's counters (generation, entered, left) are ``mark``."""
    said = {"mark": mark, "stack": stack, "time": time.monotonic()}
    draft = path.with_name(f".{path.name}")
    with suppress(OSError):  # a full disk must not disturb the job
        draft.write_text(json.dumps(said))
        os.replace(draft, path)


def merged(box: Snapshot, path: Path) -> Snapshot:
    """The snapshot with what the rank's reporter says, as far as it still holds."""
    try:
        said: dict[str, Any] = json.loads(path.read_text())
        moved = tuple(said["mark"]) != (box.generation, box.entered, box.left)
        if not moved and said["time"] >= box.phase_since:
            return replace(box, stack=tuple(said["stack"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return replace(box, raw=None)


def place(boxes: Path, rank: int) -> Path:
    """Where the note of a rank lies."""
    return boxes / f"rank_{rank}.side.json"
