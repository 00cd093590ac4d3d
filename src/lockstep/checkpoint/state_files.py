"""The files of a checkpoint that is being read: each is opened once, so that what was verified is what is loaded."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import CheckpointError
from lockstep.storage.manifest import Manifest
from lockstep.storage.open_files import open_inside, open_regular

_KEPT = 256
"""Files that stay open; a checkpoint of thousands of ranks has more, of which each rank reads few."""


class StateFiles:
    """What may be read of a folder: what its manifest lists; where Accelerate wrote it, whatever is there."""

    def __init__(self, folder: Path, found: Manifest | None) -> None:
        self.folder = folder
        self._found = found
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def listed(self) -> bool:
        """Whether a manifest says which files belong to it."""
        return self._found is not None

    def has(self, name: str) -> bool:
        """Whether a file belongs to the checkpoint."""
        return os.path.lexists(self.folder / name) if self._found is None else name in self._found.files

    def open(self, path: Path) -> int:
        """A descriptor of a file below the folder, which the caller closes."""
        name = path.relative_to(self.folder).as_posix()
        if self._found is not None and name not in self._found.files:
            raise CheckpointError(f"{path} is not a part of the checkpoint: its manifest does not list it.")
        with self.opened(name) as descriptor:
            return os.dup(descriptor)

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """A descriptor, the same one for everybody who asks; only for reading at a given offset."""
        with self._lock:
            descriptor = self._open.get(name)
            fresh = descriptor is None
            if descriptor is None:
                descriptor = self._open_file(name)
            kept = not fresh or len(self._open) < _KEPT
            if kept:
                self._open[name] = descriptor
        try:
            yield descriptor
        finally:
            if not kept:
                os.close(descriptor)

    def _open_file(self, name: str) -> int:
        path = self.folder / name
        if self._found is None:
            return open_regular(path)
        descriptor = open_inside(self.folder, name)
        seen, size = os.fstat(descriptor).st_size, self._found.files[name].size
        if seen != size:
            os.close(descriptor)
            raise CheckpointError(f"{path} has {seen} bytes, and {size} were written: it is not the same file.")
        return descriptor

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()
