"""A disk that forgets: what of a save can be on the medium after a power loss, at every call in turn.

POSIX promises little. The content of a file is on the medium after an fsync of the file; its name, a rename or a
deletion is after an fsync of the folder. Until then each may have got there or not, independently of the others. A
`ForgetfulDisk` does what it is told on the real disk, keeps account of what is synced, and before each call collects
the folders that a machine could find that loses power there.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.storage.disk import Disk

Tree = dict[str, Any]
"""A folder: names, and what is there, bytes or another folder."""


@dataclass(eq=False)
class File:
    data: bytes = b""
    synced: bytes = b""

    @property
    def pending(self) -> bool:
        return self.data != self.synced


@dataclass(eq=False)
class Folder:
    now: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


@dataclass(eq=False)
class Change:
    """One call that changes names: all of it reaches the medium, or nothing. It is synced with its folder."""

    folder: Folder
    names: list[tuple[Folder, str, File | Folder | None]]


class ForgetfulDisk(Disk):
    """Collects what a power loss leaves. ``skip`` is the number of a sync that is left out, to see that it matters."""

    def __init__(self, root: Path, skip: int = 0) -> None:
        self._root, self._top = root, _read(root)
        self._pending: list[Change] = []
        self._files: dict[int, File] = {}
        self._lock = threading.RLock()
        self._skip, self.syncs = skip, 0
        self.calls: list[str] = []
        self.crashes: dict[Any, tuple[str, Tree]] = {}
        """The folders that were found, each once, with the call before which the power was lost."""

    # --- the calls ---------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        with self._lock, _expected():
            self.calls.append(what)
            for tree in self.after_power_loss():
                self.crashes.setdefault(_key(tree), (f"call {len(self.calls)}, {what}", tree))
            yield

    def open(self, path: Path) -> int:
        with self._call(f"open {path.name}"):
            handle = super().open(path)
            folder, name = self._find(path)
            self._files[os.fstat(handle).st_ino] = file = File()
            self._change(folder, (folder, name, file))
            return handle

    def write(self, file: int, data: memoryview) -> int:
        with self._call("write"):
            count = super().write(file, data)
            self._files[os.fstat(file).st_ino].data += bytes(data[:count])
            return count

    def fsync(self, file: int) -> None:
        with self._call("fsync"):
            super().fsync(file)
            known = self._files[os.fstat(file).st_ino]
            if not self._skipped():
                known.synced = known.data

    def fsync_folder(self, folder: Path) -> None:
        with self._call(f"fsync {folder.name}/"):
            synced = self._folder(folder)
            if self._skipped():
                return
            for change in [change for change in self._pending if change.folder is synced]:
                _apply(change, lambda at: at.synced)
                self._pending.remove(change)

    def link(self, path: Path, name: Path) -> None:
        with self._call(f"link {name.name}"):
            super().link(path, name)
            source, (folder, own) = self._node(path), self._find(name)
            self._change(folder, (folder, own, source))

    def mkdir(self, folder: Path) -> None:
        with self._call(f"mkdir {folder.name}"):
            exists = folder.is_dir()
            super().mkdir(folder)
            if not exists:
                parent, name = self._find(folder)
                self._change(parent, (parent, name, Folder()))

    def rename(self, source: Path, target: Path) -> None:
        with self._call(f"rename {source.name} {target.name}"):
            super().rename(source, target)
            (old, name), (new, own) = self._find(source), self._find(target)
            self._change(new, (old, name, None), (new, own, old.now[name]))

    def remove(self, folder: Path) -> None:
        if folder.is_file():
            self.unlink(folder)
            return
        for path in sorted(folder.iterdir()):
            self.remove(path)
        self.rmdir(folder)

    def rmdir(self, folder: Path) -> None:
        with self._call(f"rmdir {folder.name}"):
            super().rmdir(folder)
            if not folder.exists():
                parent, name = self._find(folder)
                if name in parent.now:
                    self._change(parent, (parent, name, None))

    def unlink(self, path: Path) -> None:
        with self._call(f"unlink {path.name}"):
            exists = path.exists()
            super().unlink(path)
            if exists:
                folder, name = self._find(path)
                self._change(folder, (folder, name, None))

    # --- the account -------------------------------------------------------------------------------------------

    def _skipped(self) -> bool:
        self.syncs += 1
        return self.syncs == self._skip

    def _node(self, path: Path) -> File | Folder:
        node: File | Folder = self._top
        for part in path.relative_to(self._root).parts:
            assert isinstance(node, Folder)
            node = node.now[part]
        return node

    def _folder(self, path: Path) -> Folder:
        node = self._node(path)
        assert isinstance(node, Folder)
        return node

    def _find(self, path: Path) -> tuple[Folder, str]:
        return self._folder(path.parent), path.name

    def _change(self, folder: Folder, *names: tuple[Folder, str, File | Folder | None]) -> None:
        change = Change(folder, list(names))
        _apply(change, lambda at: at.now)
        self._pending.append(change)

    def after_power_loss(self) -> Iterator[Tree]:
        """What may be found: everything kept, everything lost, and each thing lost or kept alone, or up to it."""
        files = [file for file in self._all_files() if file.pending]
        items: list[Change | File] = [*self._pending, *files]
        yield self._tree(set(), b"")
        for fill in (b"", b"\0"):
            yield self._tree(set(items), fill)
        for number, item in enumerate(items):
            yield self._tree({item}, b"")
            yield self._tree({*items} - {item}, b"")
            yield self._tree({*items[number:]}, b"")

    def _all_files(self) -> list[File]:
        return list(self._files.values())

    def _tree(self, lost: set[Change | File], fill: bytes) -> Tree:
        """What is found without these; ``fill`` is in the place of bytes that were lost."""
        names: dict[Folder, dict[str, File | Folder]] = {}

        def entries(folder: Folder) -> dict[str, File | Folder]:
            return names.setdefault(folder, dict(folder.synced))

        for change in self._pending:
            if change not in lost:
                _apply(change, entries)

        def build(folder: Folder) -> Tree:
            return {
                name: build(node) if isinstance(node, Folder) else _content(node, node in lost, fill)
                for name, node in sorted(entries(folder).items())
            }

        return build(self._top)


def _key(tree: Tree) -> Any:
    """Tells trees apart. Python keeps the hash of bytes: those of a large file are not read again."""
    return tuple((name, _key(node) if isinstance(node, dict) else hash(node)) for name, node in tree.items())


def _content(file: File, lost: bool, fill: bytes) -> bytes:
    if not lost:
        return file.data
    return file.synced + fill * (len(file.data) - len(file.synced))


def _apply(change: Change, entries: Callable[[Folder], dict[str, File | Folder]]) -> None:
    for folder, name, node in change.names:
        if node is None:
            entries(folder).pop(name, None)
        else:
            entries(folder)[name] = node


def _read(path: Path) -> Folder:
    """What is on the medium before the save: all that is there."""
    names: dict[str, File | Folder] = {}
    for entry in path.iterdir():
        names[entry.name] = _read(entry) if entry.is_dir() else File(entry.read_bytes(), entry.read_bytes())
    return Folder(dict(names), dict(names))


def write_tree(tree: Tree, folder: Path) -> None:
    """Make what the machine finds when it is back."""
    folder.mkdir(exist_ok=True)
    for name, node in tree.items():
        if isinstance(node, bytes):
            (folder / name).write_bytes(node)
        else:
            write_tree(node, folder / name)


# ---------------------------------------------------------------- that nothing goes past it

_inside = threading.local()
_watched: list[tuple[str, list[str]]] = []
_EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@contextmanager
def _expected() -> Iterator[None]:
    _inside.depth = getattr(_inside, "depth", 0) + 1
    try:
        yield
    finally:
        _inside.depth -= 1


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched or getattr(_inside, "depth", 0):
        return
    if event in _EVENTS or (event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES):
        for root, found in _watched:
            found += [f"{event} {path}" for path in _paths(arguments) if path.startswith(root)]


def _paths(arguments: Iterable[Any]) -> list[str]:
    return [os.fspath(value) for value in arguments if isinstance(value, (str, os.PathLike))]


@contextmanager
def changes_besides(root: Path) -> Iterator[list[str]]:
    """The calls of Python's that change something below a folder, and that no `ForgetfulDisk` made."""
    if _audit not in _hooks:
        sys.addaudithook(_audit)
        _hooks.append(_audit)
    found: list[str] = []
    _watched.append((str(root), found))
    try:
        yield found
    finally:
        _watched.remove((str(root), found))


_hooks: list[Any] = []
