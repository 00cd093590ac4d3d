"""A folder with one file of raw values for each weight, and an index: as Accelerate keeps weights on disk.

The index also records size, time and hash of each file, so that one which has changed since is noticed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.host.atomic_file import replacing
from lockstep.model_files.safetensors_file import raw
from lockstep.model_files.tensor_entry import some
from lockstep.storage.open_files import open_regular, read_small

INDEX = "index.json"
_LONGEST_INDEX = 1 << 26


def hash_of(values: memoryview | bytes) -> str:
    """What the index records of a file's content."""
    return xxhash.xxh3_128_hexdigest(values)


def weight_file(folder: Path, name: str) -> Path:
    """The file of a weight."""
    if "/" in name or "\0" in name:
        raise CheckpointError(f"{name!r} cannot be the name of a file, so this weight cannot be kept on disk.")
    return folder / f"{name}.dat"


def read_index(folder: Path) -> dict[str, dict[str, Any]]:
    """What the index of a folder says of each weight; nothing where there is none."""
    path = folder / INDEX
    if not path.exists():
        return {}
    text = read_small(open_regular(path), _LONGEST_INDEX, path)
    try:
        found = dict(json.loads(text))
        if not all(isinstance(name, str) and isinstance(value, dict) for name, value in found.items()):
            raise TypeError
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError(
            f"{path} is there and cannot be read. Delete it, or give another offload_folder."
        ) from None
    return found


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """Replace the index of a folder by a complete one, or leave the one that is there."""
    with replacing(folder / INDEX) as draft:
        Path(draft).write_text(json.dumps(index, indent=2))


class OffloadFolder:
    """Writes weights into a folder, as a context: at its end all of them are there and in the index, or none is.

    What the folder held before stays, weights of the same names excepted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Where they go."""
        self._drafts: dict[str, Path] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._ties: list[tuple[str, str]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._failed(error) from error
        self._index = read_index(folder)

    def __enter__(self) -> OffloadFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.publish()
        finally:
            for draft in self._drafts.values():
                with suppress(OSError):
                    draft.unlink()

    def write(self, name: str, value: Tensor) -> None:
        """Keep a weight; one whose file already holds these values is left as it is."""
        path = weight_file(self.folder, name)
        content = raw(value) if value.numel() else memoryview(b"")
        entry = describe(value) | {"xxh3": hash_of(content)}
        if self._is_there(path, entry, self._index.get(name)):
            return
        draft = self._drafts.setdefault(name, self.folder / f".{name}.{os.urandom(4).hex()}.part")
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                status = os.fstat(file.fileno())
        except OSError as error:
            raise self._failed(error) from error
        self._entries[name] = entry | {"size": status.st_size, "mtime_ns": status.st_mtime_ns}

    def tie(self, names: Sequence[str]) -> None:
        """Keep one file for what is one weight under several names: that of the first name which is kept here."""
        kept = [name for name in names if name in self._entries or name in self._index]
        first = next((name for name in names if name in self._entries), kept[0] if kept else None)
        if first is not None:
            self._ties += [(first, name) for name in names if name != first]

    def _is_there(self, path: Path, entry: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
        if known is None or any(known.get(key) != value for key, value in entry.items()):
            return False
        with suppress(OSError):
            status = path.stat()
            return (status.st_size, status.st_mtime_ns) == (known.get("size"), known.get("mtime_ns"))
        return False

    def publish(self) -> None:
        """Put what was written in place, and into the index."""
        try:
            self._publish()
        except OSError as error:
            raise self._failed(error) from error

    def _publish(self) -> None:
        for first, name in self._ties:  # before anything is renamed: it may need room
            if name in self._drafts:
                self._drafts[name].unlink()
            draft = self.folder / f".{name}.{os.urandom(4).hex()}.part"
            self._drafts[name] = draft
            _link(self._drafts.get(first) or weight_file(self.folder, first), draft)
            self._entries[name] = self._entries.get(first) or self._index[first]
        for name in list(self._drafts):
            os.replace(self._drafts[name], weight_file(self.folder, name))
            del self._drafts[name]
        if self._entries:
            write_index(self.folder, self._index | self._entries)
        self._ties, self._index, self._entries = [], self._index | self._entries, {}

    def _failed(self, error: OSError) -> CheckpointError:
        where, reason = self.folder, error.strerror or str(error)
        text = f"Weights cannot be offloaded to {where}: {reason}. Its index is as it was."
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            with suppress(OSError):
                text += f" {shutil.disk_usage(where).free} bytes are free there."
        return CheckpointError(f"{text} Give a folder that can be written to and has room for them.")


def describe(value: Tensor) -> dict[str, Any]:
    """What the index says of a weight besides its file."""
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}


def _link(existing: Path, new: Path) -> None:
    """One file under two names; a second one where the file system has no links."""
    try:
        os.link(existing, new)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT):
            raise
        shutil.copy2(existing, new)


def check_covers(folder: Path, wanted: Mapping[str, Tensor], tied: Sequence[Sequence[str]] = ()) -> None:
    """Raise unless the folder's index has each of these weights, with its shape; a tied one under one of its names."""
    index = read_index(folder)
    for names in tied:
        entry = next((index[name] for name in names if name in index), None)
        index |= {} if entry is None else {name: entry for name in names if name not in index}
    if absent := [name for name in wanted if name not in index]:
        raise CheckpointError(
            f"{len(absent)} weights have no values (they are on the meta device) and are not in {folder / INDEX}: "
            f"{some(absent)}. Load them first, or give the folder that they were offloaded to."
        )
    for name, value in wanted.items():
        if tuple(index[name].get("shape", ())) != tuple(value.shape):
            raise CheckpointError(
                f"{name} has shape {index[name].get('shape')} in {folder / INDEX}, and {list(value.shape)} in the "
                "model. Give the folder that this model was offloaded to."
            )


def dtype_in(entry: Mapping[str, Any], name: str) -> torch.dtype:
    """The dtype that an index gives a weight."""
    found = getattr(torch, str(entry.get("dtype", "")).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"The index of offloaded weights gives {name} the dtype {entry.get('dtype')!r}.")
    return found
