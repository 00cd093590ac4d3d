"""The newest checkpoint that can be used, and why newer ones cannot."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint import hashing, manifest
from lockstep.checkpoint.commit import left_beside, numbered
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.once import FileOnce
from lockstep.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A folder, looked at without reading its files through."""

    path: Path
    """Where it is."""
    manifest: Manifest | None = None
    """Its manifest, if it has one that can be used."""
    problem: str | None = None
    """Why it cannot be loaded; None when nothing speaks against it so far."""


def look(path: Path) -> Seen:
    """Whether a folder has a manifest, and all files in their full length."""
    try:
        found = manifest.read(path)
    except CheckpointError as error:
        return Seen(path=path, problem=str(error))
    for name, entry in found.files.items():
        problem = _wrong_size(path / name, entry.size)
        if problem is not None:
            return Seen(path=path, manifest=found, problem=problem)
    return Seen(path=path, manifest=found)


def _wrong_size(path: Path, size: int) -> str | None:
    try:
        state = os.lstat(path)
    except FileNotFoundError:
        return f"{path} is missing."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    if not os.path.isfile(path) or os.path.islink(path):
        return f"{path} is no plain file."
    if state.st_size != size:
        return f"{path} has {state.st_size} bytes, and {size} were written: it is cut off or not the same file."
    return None


class Checking:
    """Hashing the files of a checkpoint in other threads, while this one reads them.

    Of the files ``own``, which this thread reads from one end to the other, what is read is what is hashed.
    """

    def __init__(
        self,
        path: Path,
        found: Manifest,
        chunks: Sequence[hashing.Chunk],
        pool: ThreadPoolExecutor,
        own: Collection[str] = (),
    ) -> None:
        self._path, self._found = path, found
        self._own: dict[str, FileOnce | None] = dict.fromkeys(own)
        self._pending = [(chunk, pool.submit(self._check, chunk)) for chunk in chunks if chunk[0] not in self._own]

    def open(self, path: Path) -> FileOnce | Path:
        """What to read a file from."""
        if path.name not in self._own:
            return path
        file = self._own[path.name] = FileOnce(path, self._found.chunk)
        return file

    def _check(self, chunk: hashing.Chunk) -> str | None:
        name, number = chunk
        path = self._path / name
        try:
            mark = hashing.hash_chunk(path, number, self._found.chunk)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}."
        return self._compare(name, number, mark)

    def _compare(self, name: str, number: int, mark: str) -> str | None:
        entry, chunk = self._found.files[name], self._found.chunk
        if mark == entry.chunks[number]:
            return None
        first, last = number * chunk, min((number + 1) * chunk, entry.size)
        return f"{self._path / name} is damaged: bytes {first} to {last} are not those that were written."

    def problems(self) -> list[str]:
        """What is wrong with each file that does not hash to what was written; nothing when all do."""
        wrong: dict[str, str] = {}
        for name, file in self._own.items():
            problem = self._finish(name, file)
            if problem is not None:
                wrong[name] = problem
        for (name, _), check in self._pending:
            problem = check.result()
            if problem is not None:
                wrong.setdefault(name, problem)
        return list(wrong.values())

    def _finish(self, name: str, file: FileOnce | None) -> str | None:
        """Of a file that was read here, or would have been had nothing come between."""
        try:
            if file is None:
                with FileOnce(self._path / name, self._found.chunk) as file:
                    marks = file.finish()
            else:
                marks = file.finish()
        except OSError as error:
            return f"{self._path / name} cannot be read: {error.strerror or error}."
        if len(marks) != len(self._found.files[name].chunks):
            return f"{self._path / name} is damaged: its size has changed."
        wrong = (self._compare(name, number, mark) for number, mark in enumerate(marks))
        return next((problem for problem in wrong if problem is not None), None)

    def cancel(self) -> None:
        """Hash no more than is under way."""
        for _, check in self._pending:
            check.cancel()
        for file in self._own.values():
            if file is not None:
                file.close()


def verify(path: Path, threads: int | None = None) -> list[str]:
    """Read a checkpoint through; what is wrong with it, nothing when it is whole."""
    seen = look(path)
    if seen.problem is not None or seen.manifest is None:
        return [str(seen.problem)]
    with hashing.pool(threads or os.cpu_count() or 1) as pool:
        return Checking(path, seen.manifest, seen.manifest.chunks(), pool).problems()


def candidates(place: Path, *, many: bool) -> list[Path]:
    """Folders to try, the best first: the numbered ones in a folder, or the one folder itself.

    A folder that is missing may have been on its way to another name when the machine stopped, with all it holds.
    """
    if many:
        return [path for _, path in numbered(place)]
    if place.exists():
        return [place]
    return _newest_first(path for path in left_beside(place) if look(path).problem is None)


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: (path / manifest.NAME).stat().st_mtime, reverse=True)
