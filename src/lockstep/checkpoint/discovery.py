"""The newest checkpoint that can be used, and why newer ones cannot."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint.state_files import StateFiles
from lockstep.errors import CheckpointError
from lockstep.storage import hashing, manifest
from lockstep.storage.commit import numbered, pending
from lockstep.storage.manifest import Manifest

if TYPE_CHECKING:
    from lockstep.model_files.parallel_read import Outline


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """A folder, looked at without reading its files through."""

    path: Path
    """Where it is."""
    folder: Path
    """Where its files are: the same, unless a save was interrupted after its commit."""
    manifest: Manifest | None = None
    """Its manifest, if it has one that can be used."""
    problem: str | None = None
    """Why it cannot be loaded; None when nothing speaks against it so far."""


def inspect_folder(path: Path) -> CheckpointFolder:
    """Whether a folder has a manifest, and all files in their full length."""
    folder = pending(path)
    if folder is None or not (folder / manifest.NAME).exists():  # of a model: the state is where it was
        folder = path
    try:
        found = manifest.read(folder)
    except CheckpointError as error:
        return CheckpointFolder(path=path, folder=folder, problem=str(error))
    for name, entry in found.files.items():
        problem = _wrong_size(folder, name, entry.size)
        if problem is not None:
            return CheckpointFolder(path=path, folder=folder, manifest=found, problem=problem)
    return CheckpointFolder(path=path, folder=folder, manifest=found)


def _wrong_size(folder: Path, name: str, size: int) -> str | None:
    path = folder / name
    try:
        state = os.lstat(path)
    except FileNotFoundError:
        return f"{path} is missing."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    if not stat.S_ISREG(state.st_mode):
        return f"{path} is not a regular file, or a link."
    if state.st_size != size:
        return (
            f"{path} has {state.st_size} bytes, and {size} were written: it is cut off or not the same file."
            + _overwritten(folder, name)
        )
    return None


def _overwritten(folder: Path, name: str) -> str:
    """Says so where a file that is not what was written has been changed after the manifest, which is written last."""
    try:
        changed, saved = os.lstat(folder / name).st_mtime, os.lstat(folder / manifest.NAME).st_mtime
    except OSError:
        return ""
    if changed <= saved:
        return ""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed))
    return f" {name} was overwritten at {when}, after the checkpoint was saved: another program writes to this folder."


class Checking:
    """Hashing the files of a checkpoint in other threads, while this one reads them.

    Files of ``apart`` are hashed while ``fill`` reads them, or at the end.
    """

    def __init__(
        self,
        files: StateFiles,
        found: Manifest,
        chunks: Sequence[hashing.Chunk],
        pool: ThreadPoolExecutor,
        apart: Collection[str] = (),
    ) -> None:
        self._files, self._path, self._found, self._pool = files, files.folder, found, pool
        self._apart = {name: [chunk for chunk in chunks if chunk[0] == name] for name in apart if name in found.files}
        self._pending: list[tuple[hashing.Chunk, Future[str | None]]] = []
        self._start(chunk for chunk in chunks if chunk[0] not in self._apart)

    def fill(self, path: Path, outline: Outline) -> None:
        """Read a file into its tensors; what is wrong with it is among the ``problems``."""
        mine, chunk = set(self._apart.pop(path.name)), self._found.chunk
        numbers = range(len(self._found.files[path.name].chunks))
        for part in self._start(
            ((path.name, number) for number in numbers),
            lambda name, number: outline.read(number, chunk, hashed=(name, number) in mine),
        ):
            part.result()

    def _start(
        self, chunks: Iterable[hashing.Chunk], hashed: Callable[[str, int], str | None] | None = None
    ) -> list[Future[str | None]]:
        started = [(chunk, self._pool.submit(self._check, chunk, hashed or self._hash)) for chunk in chunks]
        self._pending += started
        return [check for _, check in started]

    def _hash(self, name: str, number: int) -> str:
        with self._files.opened(name) as descriptor:
            return hashing.hash_chunk(descriptor, number, self._found.chunk)

    def _check(self, chunk: hashing.Chunk, hashed: Callable[[str, int], str | None]) -> str | None:
        name, number = chunk
        path, found = self._path / name, self._found
        try:
            mark = hashed(name, number)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}."
        except CheckpointError as error:
            return str(error)
        if mark is None or mark == found.files[name].chunks[number]:
            return None
        first, last = number * found.chunk, min((number + 1) * found.chunk, found.files[name].size)
        return f"{path} is damaged: bytes {first} to {last} are not those that were written." + _overwritten(
            self._path, name
        )

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
    seen = inspect_folder(path)
    if seen.problem is not None or seen.manifest is None:
        return [str(seen.problem)]
    files = StateFiles(seen.folder, seen.manifest)
    with closing(files), hashing.pool(threads or os.cpu_count() or 1) as pool:
        return Checking(files, seen.manifest, seen.manifest.chunks(), pool).problems()


def additional(path: Path) -> list[str]:
    """Files in a checkpoint's folder that are not part of it: nothing of them is ever loaded."""
    seen = inspect_folder(path)
    listed = set() if seen.manifest is None else {*seen.manifest.files, manifest.NAME}
    found = (Path(parent, name) for parent, _, names in os.walk(seen.folder) for name in names)
    return sorted(name for file in found if (name := file.relative_to(seen.folder).as_posix()) not in listed)


def candidates(place: Path, *, many: bool) -> list[Path]:
    """Folders to try, the best first: the numbered ones in a folder, or the one folder itself."""
    if many:
        return [path for _, path in numbered(place)]
    return [place] if place.exists() else []
