"""The newest checkpoint that can be used, and why newer ones cannot."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint import hashing, manifest
from lockstep.checkpoint.commit import left_beside, numbered
from lockstep.checkpoint.manifest import Manifest
from lockstep.errors import CheckpointError

if TYPE_CHECKING:
    from lockstep.checkpoint.fetched import Outline


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

    Files of ``apart`` are hashed while ``fill`` reads them, or at the end.
    """

    def __init__(
        self,
        path: Path,
        found: Manifest,
        chunks: Sequence[hashing.Chunk],
        pool: ThreadPoolExecutor,
        apart: Collection[str] = (),
    ) -> None:
        self._path, self._found, self._pool = path, found, pool
        self._apart = {name: [chunk for chunk in chunks if chunk[0] == name] for name in apart if name in found.files}
        self._pending: list[tuple[hashing.Chunk, Future[str | None]]] = []
        self._start(chunk for chunk in chunks if chunk[0] not in self._apart)

    def fill(self, path: Path, outline: Outline) -> None:
        """Read a file into its tensors; what is wrong with it is among the ``problems``."""
        mine, chunk = set(self._apart.pop(path.name)), self._found.chunk
        numbers = range(len(self._found.files[path.name].chunks))
        for part in self._start(
            ((path.name, number) for number in numbers),
            lambda path, number: outline.read(number, chunk, hashed=(path.name, number) in mine),
        ):
            part.result()

    def _start(
        self, chunks: Iterable[hashing.Chunk], hashed: Callable[[Path, int], str | None] | None = None
    ) -> list[Future[str | None]]:
        hash_chunk = hashed or (lambda path, number: hashing.hash_chunk(path, number, self._found.chunk))
        started = [(chunk, self._pool.submit(self._check, chunk, hash_chunk)) for chunk in chunks]
        self._pending += started
        return [check for _, check in started]

    def _check(self, chunk: hashing.Chunk, hashed: Callable[[Path, int], str | None]) -> str | None:
        name, number = chunk
        path, found = self._path / name, self._found
        try:
            mark = hashed(path, number)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}."
        if mark is None or mark == found.files[name].chunks[number]:
            return None
        first, last = number * found.chunk, min((number + 1) * found.chunk, found.files[name].size)
        return f"{path} is damaged: bytes {first} to {last} are not those that were written."

    def problems(self) -> list[str]:
        """What is wrong with each file that does not hash to what was written; nothing when all do."""
        for chunks in self._apart.values():
            self._start(chunks)
        self._apart = {}
        wrong: dict[str, str] = {}
        for (name, _), check in self._pending:
            problem = check.result()
            if problem is not None:
                wrong.setdefault(name, problem)
        return list(wrong.values())

    def cancel(self) -> None:
        """Hash no more than is under way."""
        for _, check in self._pending:
            check.cancel()


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
