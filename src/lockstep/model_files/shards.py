"""Which tensor goes into which file, and the index that says so.

The plan is the one that Accelerate and transformers make, so that names and contents of files are the same: tensors in
their order, a new file where the next one would not fit any more, a file of its own for one that is too large.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.model_files.shared_tensors import id_tensor_storage, stored_bytes
from lockstep.storage.open_files import Opener, open_regular, read_small

_LONGEST_INDEX = 1 << 26
"""Bytes; half a million tensors with long names."""
_FEW = 1_000_000
"""Brackets and quotes that need no names of tensors and files around them."""


@dataclass(frozen=True)
class ShardPlan:
    """The files to be written."""

    files: dict[str, list[str]]
    """The names of the tensors in each file, by its name."""
    total_size: int
    """Bytes of all tensors, those under several names once."""

    @property
    def sharded(self) -> bool:
        """Whether there is more than one, so that an index is needed."""
        return len(self.files) > 1

    def index(self) -> bytes:
        """The content of the index file."""
        places = {name: file for file, names in self.files.items() for name in names}
        content = {"metadata": {"total_size": self.total_size}, "weight_map": places}
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def plan(state: Mapping[str, Any], largest: int, stem: str, suffix: str, *, together: bool) -> ShardPlan:
    """Divide a state dict into files of at most this many bytes.

    ``together``: tensors that share a storage go into one file, whose format keeps what they share, and count once.
    """
    shards: list[list[str]] = []
    open_shard: list[str] = []
    filled = total = 0
    homes: dict[Hashable, list[str]] = {}
    for name, value in state.items():
        key = _storage_key(name, value) if together else name
        if key in homes:
            continue
        size = stored_bytes(value) if isinstance(value, Tensor) else 0
        total += size
        if size > largest:
            homes[key] = [name]
            shards.append(homes[key])
            continue
        if open_shard and filled + size > largest:
            shards.append(open_shard)
            open_shard, filled = [], 0
        homes[key] = open_shard
        open_shard.append(name)
        filled += size
    if open_shard or not shards:
        shards.append(open_shard)
    placed = {name for names in shards for name in names}
    for name, value in state.items():
        if name not in placed:
            homes[_storage_key(name, value)].append(name)
    return ShardPlan({_name(stem, suffix, number, len(shards)): names for number, names in enumerate(shards, 1)}, total)


def _storage_key(name: str, value: Any) -> Hashable:
    if isinstance(value, Tensor) and value.layout == torch.strided and value.numel() and value.device.type != "meta":
        return id_tensor_storage(value)
    return name


def _name(stem: str, suffix: str, number: int, of: int) -> str:
    return f"{stem}{suffix}" if of == 1 else f"{stem}-{number:05d}-of-{of:05d}{suffix}"


def read_index(path: Path, opener: Opener = open_regular) -> dict[str, str]:
    """Which file each tensor is in; all are names of files beside the index, nothing else is accepted."""
    content = read_small(opener(path), _LONGEST_INDEX, path)
    brackets = content.count(b"{") + content.count(b"[")
    if brackets > _FEW or content.count(b'"') > _FEW + len(content) // 8:
        raise CheckpointError(f"{path} is no index of shards: it has more values than one of its size can hold.")
    try:
        table = json.loads(content.decode())
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON: it is damaged, or no index of shards.") from None
    if isinstance(table, dict) and "weight_map" in table:
        table = table["weight_map"]
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise CheckpointError(f'{path} has no "weight_map" that says which file each tensor is in.')
    for name, file in table.items():
        if not _is_plain_name(file):
            raise CheckpointError(
                f"{path} says that {name[:200]!r} is in {file[:200]!r}. An index names files of its own folder only."
            )
    return table


def _is_plain_name(name: str) -> bool:
    """Whether this is the name of a file, and not the way to another folder."""
    return name not in ("", ".", "..") and "\0" not in name and "\\" not in name and PurePosixPath(name).name == name
