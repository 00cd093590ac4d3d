"""Reading a file that somebody named, up to a size: it may turn out to be a device, or a dataset."""

from __future__ import annotations

import os


def read_limited(path: str | os.PathLike[str], limit: int) -> bytes:
    """All of a file; OSError where it has more than ``limit`` bytes. A pipe is read to its end, as of `<(command)`."""
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"it has more than {limit >> 10} KiB")
    return data
