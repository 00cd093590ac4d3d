"""What a pickle asks for, looked at before torch's reader does it.

``torch.load(weights_only=True)`` runs no code of the file. It still builds what the file asks for: one byte can be an
empty set of 200, and ``bytearray(10**10)`` is thirty bytes. And it follows a list that is in itself, or twenty lists
that each hold the one before twice, as far as its reader wants to go.
"""

from __future__ import annotations

import os
import pickletools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.model_files.torch_archive import Archive, is_archive

DEEPEST = 200
"""Levels of lists and tables; what we write has at most half of them."""
HINT = "If you know who wrote it, load_state(..., trusted=True) reads it; it can run any code."
_DENSE = 1 << 19
"""Empty containers that fit into 200 MB with room to spare."""
_EMPTY = (b"}", b"]", b")", b"\x8f")
_EMPTY_NAMES = frozenset({"EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET"})
_BYTEARRAY = (b"c__builtin__\nbytearray\n", b"cbuiltins\nbytearray\n")
_PICKLES = 5
"""In a file of torch before 1.6: a magic number, a version, the system, the value, the names of its storages."""
_WIDEST = 1 << 26
"""Bytes that a tensor may stand for beyond those that it has in the file: an expanded one has few."""


def check_file(file: BinaryIO, path: Path) -> Archive | None:
    """Raise unless the pickle of a file may be read by torch; the file's directory, where it has one."""
    descriptor = file.fileno()
    if not is_archive(descriptor):
        _check_old(file, path)
        return None
    archive = Archive(descriptor, path)
    for record in archive.records:
        if record.name.endswith("/data.pkl"):
            _check(archive.read(record), path)
    return archive


def _check(data: bytes, path: Path) -> None:
    if any(name in data for name in _BYTEARRAY):
        raise _refusal(path, "a bytearray, which may be of any size")
    if len(data) > _DENSE and sum(data.count(sign) for sign in _EMPTY) > max(_DENSE, len(data) // 4):
        # Texts may have brackets too: only the operations themselves are evidence.
        _count(pickletools.genops(data), path, len(data))


def _check_old(file: BinaryIO, path: Path) -> None:
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    try:
        for _ in range(_PICKLES):
            _count(pickletools.genops(file), path, size)
    except (ValueError, IndexError, AttributeError, UnicodeError, MemoryError, OverflowError):
        pass  # torch's reader has the better words for what is no pickle, or an archive of another kind
    finally:
        file.seek(0)


def _count(operations: Iterable[Any], path: Path, size: int) -> None:
    empty = 0
    for operation, argument, _ in operations:
        empty += operation.name in _EMPTY_NAMES
        if empty > _DENSE and empty > size // 4:
            raise _refusal(path, f"more than {_DENSE} empty lists, tables and sets")
        if operation.name == "GLOBAL" and str(argument).endswith(" bytearray"):
            raise _refusal(path, "a bytearray, which may be of any size")


def check_value(value: Any, path: Path, size: int) -> None:
    """Raise when a value from a file of so many bytes is nested deeply, or grows when somebody copies it."""
    sizes: dict[int, int] = {}
    most = (1 << 20) + 4 * size

    def measure(part: Any, depth: int) -> int:
        if isinstance(part, Tensor):
            _check_tensor(part, path)
            return 1
        if not isinstance(part, (dict, list, tuple, set)):
            return 1
        if depth > DEEPEST:
            raise CheckpointError(f"{path} is nested more than {DEEPEST} levels deep, or holds itself.")
        if id(part) not in sizes:
            inner = part.values() if isinstance(part, dict) else part
            sizes[id(part)] = total = 1 + sum(measure(item, depth + 1) for item in inner)
            if total > most:
                raise CheckpointError(
                    f"{path} holds lists or tables inside each other so often that they would become {total} values."
                )
        return sizes[id(part)]

    measure(value, 0)


def _check_tensor(tensor: Tensor, path: Path) -> None:
    stands_for = tensor.numel() * tensor.element_size()
    if stands_for > _WIDEST and not tensor.is_sparse and stands_for > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{path} holds a tensor of the shape {tuple(tensor.shape)}, {stands_for} bytes, of which the file has "
            f"{tensor.untyped_storage().nbytes()}."
        )


def _refusal(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} holds {what}: only tensors and plain values are read. {HINT}")
