"""Which numbered checkpoints of a folder are kept, and deleting the others."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lockstep.checkpoint.discovery import inspect_folder
from lockstep.storage.commit import discard, numbered
from lockstep.storage.disk import Disk


def prune(folder: Path, keep: int, disk: Disk) -> list[Path]:
    """Delete the oldest numbered checkpoints of a folder; those that were. Called by who holds the lock."""
    gone = []
    for path in surplus(folder, keep):
        with contextlib.suppress(OSError):
            discard(path, disk)
            gone.append(path)
    return gone


def surplus(folder: Path, keep: int) -> list[Path]:
    """What goes when so many are kept. Only complete ones count; what is older than the last of them goes.

    Folders without a file of ours are not checkpoints: files of the user's may be left in one that was deleted.
    """
    kept, found = 0, []
    for _, path in numbered(folder):
        if kept >= keep:
            found += [path] if any(path.glob("lockstep_*")) else []
        elif inspect_folder(path).problem is None:
            kept += 1
    return found
