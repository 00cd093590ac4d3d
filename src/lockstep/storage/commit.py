"""Several files appear as one, or not at all.

A place that does not exist yet gets its name by one rename: its files are complete and on the medium in a folder
beside it, whose name begins with a dot.

A place that exists is never renamed or removed: it may be a mount point, the working directory, a link to a folder on
another disk, and files of the user's may be in it. There the new files are completed in a folder inside it, and that
folder gets another name: ``.lockstep.<token>.committed``. This rename is the commit. From then on our loaders read from
that folder, which stays complete until every file has a second name in its place and old files are gone. So whenever
the process or the machine stops, the old files are found or the new ones, and the next save completes what is left.

Who writes holds a lock (``write_lock``).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.errors import CheckpointError, LockstepError
from lockstep.storage import manifest, write_lock
from lockstep.storage.disk import Disk
from lockstep.storage.model_file_names import Layout, layouts_of
from lockstep.storage.write_lock import WriteLock

PREFIX = "checkpoint_"
"""Of the folders that are numbered by us."""
_NUMBERED = re.compile(PREFIX + r"(\d+)")
_LOCK = ".writing"
_LONGEST_NAME = 128
"""Bytes of a name to which a lock's file or a token can still be added."""
_INSIDE = re.compile(r"\.lockstep\.([0-9a-f]{16})\.(partial|committed)")


def partial_inside(place: Path, token: str) -> Path:
    """What is being written inside a place that exists, or is on its way out."""
    return place / f".lockstep.{token}.partial"


def partial_beside(place: Path, token: str) -> Path:
    """The same beside a place that does not exist, or is on its way out."""
    return place.with_name(f".{_stem(place)}.{token}.partial")


def _stem(place: Path) -> str:
    """A place's name, or what stands for it: a name that the file system takes may leave no room for more."""
    encoded = os.fsencode(place.name)
    if len(encoded) <= _LONGEST_NAME:
        return place.name
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def pending(place: Path) -> Path | None:
    """The folder in a place whose files are committed, and not all under their names yet; None where all are."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        found = [place / name for name in os.listdir(place) if _is_pending(place / name)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _is_pending(folder: Path) -> bool:
    """Whether it is such a folder."""
    match = _INSIDE.fullmatch(folder.name)
    return match is not None and match[2] == "committed" and folder.is_dir() and not folder.is_symlink()


def reads_pending(place: Path) -> str:
    """What is logged when such a folder is read from: a program that wrote there since would be surprised."""
    return (
        f"A save to {place} was interrupted after its commit. What it saved is read from .lockstep.….committed in it, "
        "and not what other programs may have written there since. The next save there completes it."
    )


def pending_file(path: Path) -> Path:
    """Where to read a file that may be committed and not under its name yet."""
    folder = pending(path.parent)
    return folder / path.name if folder is not None and (folder / path.name).exists() else path


class Staging:
    """One save into one place: a folder to write into, which is published as a whole or removed.

    With ``numbered`` the right to write is that to all numbered checkpoints of a folder, since writing one deletes
    others. ``wait`` is for how many seconds to wait for another writer.
    """

    def __init__(
        self, place: Path, disk: Disk, *, durable: bool = True, numbered: bool = False, wait: float = 0.0
    ) -> None:
        if place.is_symlink() and not place.exists():
            place = Path(os.path.realpath(place))  # made where the link points to
        if place.exists() and not place.is_dir():
            raise CheckpointError(f"{place} is a file; to save there it has to be a folder, or not to exist.")
        self.place, self._disk, self._durable = place, disk, durable
        disk.make(place.parent, durable=durable)
        self._lock, self.exists = _lock(place, disk, numbered, wait)
        """Whether the place exists already."""
        self._inner: WriteLock | None = None
        try:
            self._sweep(numbered)
            token = self._lock.token
            self.folder = partial_inside(place, token) if self.exists else partial_beside(place, token)
            """Where to write."""
            disk.mkdir(self.folder)
        except BaseException:
            self._lock.release()
            raise

    def _sweep(self, numbered: bool) -> None:
        places = {Path(os.path.realpath(self.place)), *(_left_numbers(self.place.parent) if numbered else ())}
        for place in places:
            for path in _left_beside(place):
                self._disk.remove(path)
        write_lock.sweep(self._lock.path, self._disk)
        if self.exists:
            _sweep_inside(self.place, self._lock, self._disk, self._durable)

    def publish(self) -> str | None:
        """Commit what was written. What failed after the commit, if anything did: our loaders find it all the same."""
        disk, durable = self._disk, self._durable
        self._lock.check()
        if durable:
            for inner in _folders(self.folder):
                disk.fsync_folder(inner)
        self._lock.check()
        whole = not self.exists and self._rename_whole()
        committed = self.place / f".lockstep.{self._lock.token}.committed"
        if not whole:
            _refuse_obstacles(self.place, self.folder)
            disk.rename(self.folder, committed)
        try:
            if durable:
                disk.fsync_folder(self.place.parent if whole else self.place)
            if not whole:
                _complete(self.place, committed, self._inner or self._lock, disk, durable)
        except (OSError, LockstepError) as error:
            return describe(error)
        return None

    def check(self) -> None:
        """CheckpointError when another process has taken over."""
        self._lock.check()

    def _rename_whole(self) -> bool:
        """Give the folder the name of its place; False when somebody has made a folder there meanwhile."""
        try:
            self._disk.rename(self.folder, self.place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not self.place.is_dir():
                raise
            self._inner = write_lock.acquire(self.place / _LOCK, self.place, self._disk)
            _sweep_inside(self.place, self._inner, self._disk, self._durable)
            return False
        return True

    def close(self) -> None:
        """Remove what was not committed, and let others write here."""
        try:
            if os.path.lexists(self.folder):
                self._disk.remove(self.folder)
        finally:
            for lock in (self._inner, self._lock):
                if lock is not None:
                    lock.release()


def describe(error: BaseException) -> str:
    """An error in a line: what the system says of a file, or what we say."""
    if isinstance(error, LockstepError):
        return str(error)
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}"
    return f"{type(error).__name__}: {error}"


def unfinished(what: str, problem: str) -> str:
    """The message for a save that failed after its commit."""
    return (
        f"{what} is saved and can be loaded, but the save did not finish: {problem.rstrip('.')}. Other programs may "
        "not find all of its files, and a power loss may undo it, until a further save there succeeds. Make room, or "
        "remove what is in the way."
    )


def _lock(place: Path, disk: Disk, numbered: bool, wait: float) -> tuple[WriteLock, bool]:
    """The right to write, and whether the place exists: in a place that does, else beside it.

    In it, since its parent may be another file system, or not ours to write to.
    """
    if numbered:
        return write_lock.acquire(place.with_name(_LOCK), place, disk, wait=wait), False
    while True:
        exists = place.is_dir()
        lock = write_lock.acquire(place / _LOCK if exists else _beside_lock(place), place, disk, wait=wait)
        if place.is_dir() == exists:
            break
        lock.release()
    real = Path(os.path.realpath(place))
    if exists and real.name:
        try:
            write_lock.refuse_if_held(_beside_lock(real), place)
        except BaseException:
            lock.release()
            raise
    return lock, exists


def _beside_lock(place: Path) -> Path:
    return place.with_name(f".{_stem(place)}{_LOCK}")


def _folders(folder: Path) -> Iterator[Path]:
    """The folder and those in it, the innermost first."""
    for path, _, _ in os.walk(folder, topdown=False):
        yield Path(path)


# ---------------------------------------------------------------- from the committed folder to the files' names


def _complete(place: Path, committed: Path, lock: WriteLock, disk: Disk, durable: bool) -> None:
    """Put committed files under their names, remove those that they replace, and then the folder.

    Other programs know nothing of the folder. For them the index of a divided model goes first and comes last, each
    step on the medium before the next; a single file is replaced at one instant.
    """
    names, last = _ordered(committed)
    divided = [layout.index for layout in layouts_of("model") if layout.index in last]
    if divided:
        _unlink(place, divided, lock, disk)
        _sync(place, (), disk, durable)
    _put(place, committed, names, lock, disk, durable)
    stale = _superseded(place, {*names, *last})
    if manifest.NAME in last:
        _unlink(place, stale, lock, disk)  # while the old manifest is there to say what they are
        stale, divided = [], divided or stale
    if divided:
        _sync(place, names, disk, durable)
    _put(place, committed, last, lock, disk, durable)
    _unlink(place, stale, lock, disk)
    _sync(place, (*names, *last), disk, durable)
    lock.check()
    gone = partial_inside(place, _token(committed))
    disk.rename(committed, gone)
    _sync(place, (), disk, durable)  # else the name might be back after a power loss, and its files not
    disk.remove(gone)


def _token(committed: Path) -> str:
    match = _INSIDE.fullmatch(committed.name)
    return match[1] if match else secrets.token_hex(8)


def _files(folder: Path, *, links: bool = True) -> list[str]:
    """All files in a folder, by their path in it, and links, which a hook of the user's may have made."""
    paths = (Path(at, name) for at, folders, names in os.walk(folder) for name in (*folders, *names))
    kinds = (stat.S_IFREG, stat.S_IFLNK) if links else (stat.S_IFREG,)
    return sorted(path.relative_to(folder).as_posix() for path in paths if stat.S_IFMT(path.lstat().st_mode) in kinds)


def _ordered(committed: Path) -> tuple[list[str], list[str]]:
    """The files in the folder, and apart from them those with which readers begin: they come last."""
    names = _files(committed)
    entry_points = [name for layout in layouts_of("model") for name in layout.entry_points]
    last = [name for name in (*entry_points, manifest.NAME) if name in names]
    return [name for name in names if name not in last], last


def _superseded(place: Path, new: set[str]) -> list[str]:
    """Old files that go when new ones come: what the old state listed, or shards and index of the old model.

    Nothing else: whatever is not ours stays. The first to go are those with which readers begin.
    """
    try:
        if manifest.NAME in new:
            old = [name for name in manifest.read(place).files if not _through_link(place, name)]
        else:
            old = [name for name in os.listdir(place) for layout in _layouts(new) if layout.owns(name)]
    except (OSError, CheckpointError):
        return []
    first = [name for layout in layouts_of("model") for name in layout.entry_points]
    return sorted((name for name in old if name not in new), key=lambda name: (name not in first, name))


def _layouts(names: set[str]) -> list[Layout]:
    return [layout for layout in layouts_of("model") if names & set(layout.entry_points)]


def _through_link(place: Path, name: str) -> bool:
    return any(parent.is_symlink() for parent in _parents(place, name))


def _parents(place: Path, name: str) -> list[Path]:
    """The folders between a place and a file in it, the innermost first."""
    return [place / parent for parent in list(Path(name).parents)[:-1]]


def _put(place: Path, committed: Path, names: Iterable[str], lock: WriteLock, disk: Disk, durable: bool) -> None:
    for name in names:
        source, target = committed / name, place / name
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(source), os.lstat(target)):
                continue  # was there when a save was interrupted
        disk.make(target.parent, durable=durable)
        second = partial_inside(target.parent, _token(committed))
        disk.unlink(second)
        disk.link_or_copy(source, second, durable=durable)
        lock.check()
        disk.rename(second, target)


def _unlink(place: Path, names: Iterable[str], lock: WriteLock, disk: Disk) -> None:
    for name in names:
        if os.path.lexists(place / name):
            lock.check()
            disk.unlink(place / name)
        for parent in _parents(place, name):
            disk.rmdir(parent)


def _sync(place: Path, names: Iterable[str], disk: Disk, durable: bool) -> None:
    if durable:
        for folder in sorted({(place / name).parent for name in names} | {place}, reverse=True):
            disk.fsync_folder(folder)


def _refuse_obstacles(place: Path, folder: Path) -> None:
    """Raise before the commit where a file could not get its name after it."""
    for name in _files(folder):
        obstacle = next((path for path in _parents(place, name) if path.exists() and not path.is_dir()), None)
        if obstacle is None and (place / name).is_dir() and not (place / name).is_symlink():
            obstacle = place / name
        if obstacle is not None:
            what = "a folder" if obstacle.is_dir() else "a file"
            raise CheckpointError(
                f"{obstacle} is {what}, and {name} has to be written there. Move it away, or save elsewhere."
            )


def _sweep_inside(place: Path, lock: WriteLock, disk: Disk, durable: bool) -> None:
    """Complete what a writer that is gone has committed, and remove what it has not."""
    while (committed := pending(place)) is not None:
        if durable:  # whoever committed it may have died before it was on the medium
            for name in _files(committed, links=False):
                disk.fsync_file(committed / name)
            for folder in (*_folders(committed), place):
                disk.fsync_folder(folder)
        _complete(place, committed, lock, disk, durable)
    for name in os.listdir(place):
        if _INSIDE.fullmatch(name):
            disk.remove(place / name)
    write_lock.sweep(place / _LOCK, disk)


# ---------------------------------------------------------------- numbered checkpoints


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """The numbered checkpoints in a folder, the newest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    found = [(int(match[1]), folder / name) for name in names if (match := _NUMBERED.fullmatch(name))]
    return sorted(found, reverse=True)


def _left_beside(place: Path) -> list[Path]:
    """Folders beside a place that were to become it, or were it."""
    pattern = re.compile(re.escape(f".{_stem(place)}.") + r"[0-9a-f]{16}\.partial")
    with contextlib.suppress(OSError):
        return [place.with_name(name) for name in os.listdir(place.parent) if pattern.fullmatch(name)]
    return []


def _left_numbers(folder: Path) -> set[Path]:
    pattern = re.compile(r"\.(" + PREFIX + r"\d+)\.[0-9a-f]{16}\.partial")
    with contextlib.suppress(OSError):
        return {folder / match[1] for name in os.listdir(folder) if (match := pattern.fullmatch(name))}
    return set()


@contextlib.contextmanager
def locked(folder: Path, disk: Disk) -> Iterator[None]:
    """The right to all numbered checkpoints of a folder, for as long as the region lasts; leftovers are removed."""
    lock = write_lock.acquire(folder / _LOCK, folder, disk)
    try:
        yield
        for place in _left_numbers(folder):
            for path in _left_beside(place):
                disk.remove(path)
        write_lock.sweep(lock.path, disk)
    finally:
        lock.release()


def discard(path: Path, disk: Disk) -> None:
    """Delete a checkpoint: first its name, then its files, so that nobody ever finds half of it.

    Where there are files that are not the checkpoint's, they stay in the folder; then the manifest goes last, so that
    the rest is found and deleted after a crash.
    """
    try:
        own = manifest.read(path).files
    except CheckpointError:
        own = {}
    if own and not {*_files(path, links=False)} <= {*own, manifest.NAME}:
        for name in (*own, manifest.NAME):
            if not _through_link(path, name):
                disk.unlink(path / name)
            for parent in _parents(path, name):
                disk.rmdir(parent)
        return
    aside = partial_beside(path, secrets.token_hex(8))
    disk.rename(path, aside)
    disk.remove(aside)
