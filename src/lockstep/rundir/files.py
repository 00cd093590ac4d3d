"""Files of the run directory: for their owner only, and never half written under their name.

It imports nothing that takes time: a rank needs it before anything else is loaded.
"""

from __future__ import annotations

import os

from lockstep.host.atomic_file import replacing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


def private(path: str, flags: int) -> int:
    """The ``opener`` of a file that nobody else may read or write, whatever the umask and the folder allow."""
    return os.open(path, flags, 0o600)


def make_folder(path: str | Path) -> None:
    """Make a folder for its owner only, and those above that are missing: logs and error texts may hold secrets."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        make_folder(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:  # another rank was quicker
        if not os.path.isdir(path):
            raise


def replace(path: str | Path, data: bytes) -> None:
    """Put a file in the place of an older one. OSError when it cannot be; the older one stays, and nothing else."""
    with replacing(path) as draft, open(draft, "wb", opener=private) as file:
        file.write(data)
