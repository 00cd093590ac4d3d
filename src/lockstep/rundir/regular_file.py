"""Reading files of a run that somebody else may have written: regular files only, so far and no further.

A pipe in place of a file would keep its reader waiting, /dev/zero has no end, and a link leads to what its maker may
not read himself. None of these is opened; what is opened is looked at again, as it may have been exchanged meanwhile.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

LARGEST = 16 << 20
"""Bytes of a file that is read whole, unless told otherwise."""
_DEEPEST = 4
"""Folders below the one that is listed: a restart has one of its own, and there is no other."""
_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def open_regular(path: str | os.PathLike[str], below: Path | None = None) -> BinaryIO:
    """Open a file for reading; OSError for a link, and for anything else that is no regular file.

    With ``below``, no folder between that one and the file is a link either, and the file lies below it.
    """
    return os.fdopen(open_descriptor(path, below), "rb")


def open_descriptor(path: str | os.PathLike[str], below: Path | None = None, *, follow: bool = False) -> int:
    """The same as a descriptor, which the caller closes; with ``follow``, through links."""
    if below is None:
        return _checked(os.fspath(path), None, follow=follow)
    parts = Path(path).relative_to(below).parts
    if not parts or ".." in parts:
        raise OSError(f"{os.fspath(path)} is not below {below}")
    folder = os.open(below, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _FLAGS | os.O_DIRECTORY, dir_fd=folder)
            os.close(folder)
            folder = inner
        return _checked(parts[-1], folder, follow=follow)
    finally:
        os.close(folder)


def _checked(name: str, folder: int | None, *, follow: bool) -> int:
    # Looked at first: opening a tape or a watchdog is an act of its own.
    if problem := _why_not(os.stat(name, dir_fd=folder, follow_symlinks=follow).st_mode):
        raise OSError(f"it is {problem}")
    file = os.open(name, _FLAGS & ~os.O_NOFOLLOW if follow else _FLAGS, dir_fd=folder)
    if problem := _why_not(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"it is {problem}")
    return file


def _why_not(mode: int) -> str:
    return "" if stat.S_ISREG(mode) else next((name for test, name in _KINDS if test(mode)), "not a regular file")


def read_regular(path: str | os.PathLike[str], *, below: Path | None = None, limit: int = LARGEST) -> bytes:
    """A file as a whole; OSError where it is no regular file, or larger than ``limit``."""
    with open_regular(path, below) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"it is larger than {limit} bytes")
    return data


def read_json(path: str | os.PathLike[str], *, below: Path | None = None, limit: int = LARGEST) -> Any:
    """What a JSON file holds; OSError as above, ValueError where it is not JSON or nested too deeply."""
    data = read_regular(path, below=below, limit=limit)
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@dataclass(frozen=True, kw_only=True)
class DirectoryEntry:
    """One name in a folder."""

    path: Path
    why_not: str = ""
    """Why it is not read; empty for a regular file."""


def list_regular(folder: Path, below: Path, most: int) -> Iterator[DirectoryEntry]:
    """The files in a folder of a run and in those in it, by name; names that begin with a dot are left out.

    ``folder`` lies below ``below``, and no link leads there. At most ``most`` are listed.
    """
    try:
        handle = os.open(below, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        yield DirectoryEntry(path=folder, why_not=error.strerror or str(error))
        return
    for count, listed in enumerate(_below(folder.relative_to(below).parts, below, handle)):
        if count == most:
            yield DirectoryEntry(path=folder, why_not=f"more than {most} files are in it")
            return
        yield listed


def _below(parts: tuple[str, ...], path: Path, handle: int, depth: int = 0) -> Iterator[DirectoryEntry]:
    """Go down ``parts``, then list; ``handle`` is the folder ``path``, and closed in the end."""
    try:
        if parts:
            names = [parts[0]]
        else:
            with os.scandir(handle) as entries:
                names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
        for name in names:
            try:
                mode = os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode
                if not stat.S_ISDIR(mode):
                    yield DirectoryEntry(path=path / name, why_not=_why_not(mode))
                elif depth >= _DEEPEST:
                    yield DirectoryEntry(path=path / name, why_not="it is nested too deeply")
                else:
                    inner = os.open(name, _FLAGS | os.O_DIRECTORY, dir_fd=handle)
                    yield from _below(parts[1:], path / name, inner, depth if parts else depth + 1)
            except FileNotFoundError:
                continue
            except OSError as error:
                yield DirectoryEntry(path=path / name, why_not=error.strerror or str(error))
    except OSError as error:
        yield DirectoryEntry(path=path, why_not=error.strerror or str(error))
    finally:
        os.close(handle)
