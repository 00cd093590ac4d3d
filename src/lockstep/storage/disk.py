"""The few calls by which a checkpoint reaches the disk, in one place.

What a crash leaves behind is decided by the order of these calls and by nothing else. Tests put a disk in place of this
one that counts them and ends the process at any, or forgets what was not synced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_START_WRITING = 2
_BLOCK = 1 << 20


class Disk:
    """The disk as it is."""

    def open(self, path: Path) -> int:
        """A new file to write to; FileExistsError when there is one."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, file: int, data: memoryview) -> int:
        """Write what it takes of the data; how many bytes that were."""
        return os.write(file, data)

    def fsync(self, file: int) -> None:
        """Wait until a file is on the medium."""
        os.fsync(file)

    def link(self, path: Path, name: Path) -> None:
        """Give a file a further name; FileExistsError when that is taken."""
        os.link(path, name, follow_symlinks=False)

    def mkdir(self, folder: Path) -> None:
        """Make a folder; one that is there already is not an error."""
        folder.mkdir(exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name; a file of that name is replaced."""
        os.rename(source, target)

    def remove(self, folder: Path) -> None:
        """Delete a folder with all that is in it; what is gone already is not an error."""
        if folder.is_symlink() or folder.is_file():
            self.unlink(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def rmdir(self, folder: Path) -> None:
        """Delete a folder if nothing is in it."""
        with contextlib.suppress(OSError):
            folder.rmdir()

    def unlink(self, path: Path) -> None:
        """Delete a file; one that is gone already is not an error."""
        path.unlink(missing_ok=True)

    def fsync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder are on the medium."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that keep no order of their own
                raise
        finally:
            os.close(handle)

    def start_writing(self, file: int, start: int, length: int) -> None:
        """Have the system begin to bring a part of a file to the medium, and do not wait for it."""
        begin = _libc_function("sync_file_range")
        if begin is not None:
            begin(file, ctypes.c_int64(start), ctypes.c_int64(length), _START_WRITING)

    # --- made of the above -------------------------------------------------------------------------------------

    def create(self, path: Path, data: bytes, *, durable: bool = False) -> None:
        """Make a small file."""
        file = self.open(path)
        try:
            self._write_all(file, memoryview(data))
            if durable:
                self.fsync(file)
        finally:
            os.close(file)

    def make(self, folder: Path, *, durable: bool) -> None:
        """Make a folder and those above it that are missing, and have the medium keep the name of each."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            self.mkdir(path)
            if durable:
                self.fsync_folder(path.parent)

    def fsync_file(self, path: Path) -> None:
        """Wait until a file that somebody else has written is on the medium."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.fsync(file)
        finally:
            os.close(file)

    def link_or_copy(self, source: Path, target: Path, *, durable: bool) -> None:
        """Give a file a second name, or its content a second file where the file system has no such names."""
        try:
            self.link(source, target)
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError:
            if source.is_symlink():
                os.symlink(os.readlink(source), target)
            else:
                self._copy(source, target, durable)

    def _copy(self, source: Path, target: Path, durable: bool) -> None:
        with source.open("rb") as content:
            file = self.open(target)
            try:
                while block := content.read(_BLOCK):
                    self._write_all(file, memoryview(block))
                if durable:
                    self.fsync(file)
            finally:
                os.close(file)

    def _write_all(self, file: int, data: memoryview) -> None:
        while data:
            data = data[self.write(file, data) :]


@functools.cache
def _libc_function(name: str) -> Callable[..., Any] | None:
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
