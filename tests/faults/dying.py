"""A disk on which a process dies."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.storage.disk import Disk
from lockstep.testing.faults import die


class Dying(Disk):
    """A disk that counts its calls and kills the process at one of them, before it or half-way through.

    With ``full`` the call fails instead, as on a disk without room. Without ``links`` files have one name each.
    """

    def __init__(self, fatal: int, *, half: bool = False, links: bool = True, full: bool = False) -> None:
        self.calls = 0
        self._fatal, self._half, self._links, self._full = fatal, half, links, full

    def _count(self, half: Callable[[], Any] = lambda: None, *, frees: bool = False) -> None:
        self.calls += 1
        if self.calls == self._fatal:
            if self._half:
                half()
            if not self._full:
                die(signal.SIGKILL)
            if not frees:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, path: Path) -> int:
        self._count(path.touch)
        return super().open(path)

    def write(self, file: int, data: memoryview) -> int:
        self._count(lambda: os.write(file, data[: len(data) // 2]))
        return super().write(file, data)

    def fsync(self, file: int) -> None:
        self._count()
        super().fsync(file)

    def link(self, path: Path, name: Path) -> None:
        self._count()
        if not self._links:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        super().link(path, name)

    def mkdir(self, folder: Path) -> None:
        self._count()
        super().mkdir(folder)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def remove(self, folder: Path) -> None:
        self._count(lambda: [path.unlink() for path in sorted(folder.iterdir())[::2] if path.is_file()], frees=True)
        super().remove(folder)

    def rmdir(self, folder: Path) -> None:
        self._count(frees=True)
        super().rmdir(folder)

    def unlink(self, path: Path) -> None:
        self._count(frees=True)
        super().unlink(path)
