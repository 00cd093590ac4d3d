"""Opening files to read that anybody may have put there: regular files only, each looked at by its descriptor.

Without torch, as ``lockstep checkpoint`` uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import CheckpointError
from lockstep.rundir.regular_file import open_descriptor

Opener = Callable[[Path], int]
"""Gives a descriptor of a file to read, which the caller closes; CheckpointError where there is nothing to read."""


def open_regular(path: Path) -> int:
    """A descriptor of a file to read; a pipe, a device or a folder of that name is not opened but refused.

    Links are followed: in the cache of the Hugging Face hub all files are links.
    """
    try:
        return open_descriptor(path, follow=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}.") from error


def open_inside(folder: Path, name: str) -> int:
    """The same for a file below a folder, with no link on the way to it from there."""
    try:
        return open_descriptor(folder / name, folder)
    except OSError as error:
        raise CheckpointError(f"{folder / name} cannot be opened: {error.strerror or error}.") from error


def read_small(descriptor: int, most: int, path: Path) -> bytes:
    """All bytes of an opened file, which is closed; CheckpointError when it has more than these."""
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > most:
            raise CheckpointError(f"{path} is too large: it may have {most} bytes.")
        try:
            file.seek(0)  # the place in it is shared with everybody who has it open
            return file.read(most)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
