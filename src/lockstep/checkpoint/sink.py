"""Where the bytes of a file go.

Writers of files do not open them: they ask a sink. So that what is needed besides the writing itself (a hash, a count,
a bar) happens while the bytes go through, and not in a second pass over them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


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
