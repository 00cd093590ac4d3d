"""A disk on which a process dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.checkpoint.disk import Disk
from lockstep.testing.faults import die


class Dying(Disk):
    """A disk that counts its calls and kills the process at one of them, before it or half-way through."""

    def __init__(self, fatal: int, *, half: bool, swaps: bool) -> None:
        self.calls = 0
        self._fatal, self._half, self._swaps = fatal, half, swaps

    def _count(self, half: Callable[[], Any] = lambda: None) -> None:
        self.calls += 1
        if self.calls == self._fatal:
            if self._half:
                half()
            die(signal.SIGKILL)

    def write(self, file: int, data: memoryview) -> int:
        self._count(lambda: os.write(file, data[: len(data) // 2]))
        return super().write(file, data)

    def fsync(self, file: int) -> None:
        self._count()
        super().fsync(file)

    def create(self, path: Path, text: str = "") -> None:
        self._count(path.touch)
        super().create(path, text)

    def link(self, path: Path, name: Path) -> None:
        self._count()
        super().link(path, name)

    def make(self, folder: Path) -> None:
        self._count()
        super().make(folder)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        self._count()
        return super().exchange(one, other) if self._swaps else False

    def remove(self, folder: Path) -> None:
        self._count(lambda: [path.unlink() for path in sorted(folder.iterdir())[::2] if path.is_file()])
        super().remove(folder)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)
