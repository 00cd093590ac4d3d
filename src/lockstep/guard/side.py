"""What a rank's reporter adds to its black box: torch's own collective that it is in, and where its main thread is.

It is written only while the rank does not move, beside the box, and counts only as long as it has not moved since.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lockstep.blackbox.snapshot import Raw, Snapshot


def write(path: Path, mark: tuple[int, int, int], raw: Raw | None, stack: tuple[str, ...]) -> None:
    """Leave a note that holds while the rank's counters (generation, entered, left) are ``mark``."""
    said = {"mark": mark, "raw": None if raw is None else asdict(raw), "stack": stack}
    draft = path.with_name(f".{path.name}")
    with suppress(OSError):  # a full disk must not disturb the job
        draft.write_text(json.dumps(said))
        os.replace(draft, path)


def merged(box: Snapshot, path: Path) -> Snapshot:
    """The snapshot with what the rank's reporter says, if it still holds."""
    try:
        said: dict[str, Any] = json.loads(path.read_text())
        if tuple(said["mark"]) != (box.generation, box.entered, box.left):
            return box
        raw = None if said["raw"] is None else Raw(**said["raw"])
        return replace(box, raw=raw, stack=tuple(said["stack"]))
    except (OSError, ValueError, KeyError, TypeError):
        return box


def place(boxes: Path, rank: int) -> Path:
    """Where the note of a rank lies."""
    return boxes / f"rank_{rank}.side.json"
