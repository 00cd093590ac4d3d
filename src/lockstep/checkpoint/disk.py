"""The few calls by which a checkpoint reaches the disk, in one place.

What a crash leaves behind is decided by the order of these calls and by nothing else. Tests put a disk in place of this
one that counts them and ends the process at any.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_EXCHANGE = 2
_START_WRITING = 2


class Disk:
    """The disk as it is."""

    def write(self, file: int, data: memoryview) -> int:
        """Write what it takes of the data; how many bytes that were."""
        return os.write(file, data)

    def fsync(self, file: int) -> None:
        """Wait until a file is on the medium."""
        os.fsync(file)

    def create(self, path: Path, text: str = "") -> None:
        """Make a small file."""
        path.write_text(text)

    def link(self, path: Path, name: Path) -> None:
        """Give a file a further name; FileExistsError when that is taken."""
        os.link(path, name)

    def make(self, folder: Path) -> None:
        """Make a folder and those above it."""
        folder.mkdir(parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name."""
        os.rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Let two folders swap their names, at one instant; False where the system cannot."""
        return _exchange(one, other)

    def remove(self, folder: Path) -> None:
        """Delete a folder with all that is in it; what is gone already is no error."""
        shutil.rmtree(folder, ignore_errors=True)

    def unlink(self, path: Path) -> None:
        """Delete a file; one that is gone already is no error."""
        path.unlink(missing_ok=True)

    def fsync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder are on the medium."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
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


def _exchange(one: Path, other: Path) -> bool:
    swap = _libc_function("renameat2")
    if swap is None:
        return False
    if swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):  # an old kernel, or a file system of another machine
        return False
    raise OSError(number, os.strerror(number), str(other))


@functools.cache
def _libc_function(name: str) -> Callable[..., Any] | None:
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
