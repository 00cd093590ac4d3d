"""Where the bytes of a file go.

Writers of files do not open them: they ask a sink. So that what is needed besides the writing itself (a hash, a count,
a bar) happens while the bytes go through, and not in a second pass over them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from lockstep.storage.disk import Disk


class Opened(Protocol):
    """A file being written."""

    def write(self, data: bytes | bytearray | memoryview, /) -> object:
        """Take all of these bytes, or raise."""
        ...


class Sink(Protocol):
    """Opens files for writing."""

    def open(self, path: Path) -> AbstractContextManager[Opened]:
        """The file, which is complete when the region ends without an error."""
        ...


class PlainSink:
    """Writes, and nothing else."""

    def open(self, path: Path) -> AbstractContextManager[Opened]:
        """The file, emptied first where it exists."""
        return path.open("wb")


PLAIN = PlainSink()


class DiskSink:
    """Writes new files through a ``Disk``, and waits until the medium has them if that is wanted."""

    def __init__(self, disk: Disk, *, durable: bool) -> None:
        self._disk, self._durable = disk, durable

    @contextmanager
    def open(self, path: Path) -> Iterator[Opened]:
        """A new file."""
        handle = self._disk.open(path)
        raw = _DiskFile(handle, self._disk)
        try:
            file = io.BufferedWriter(raw)
            yield file
            file.flush()
            if self._durable:
                self._disk.fsync(handle)
        finally:
            raw.abandoned = True
            os.close(handle)


class _DiskFile(io.RawIOBase):
    def __init__(self, handle: int, disk: Disk) -> None:
        self._handle, self._disk = handle, disk
        self.abandoned = False
        """Whether its descriptor is closed: what a failed write has left in the buffer is flushed when that goes."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        return len(view) if self.abandoned else self._disk.write(self._handle, view)
