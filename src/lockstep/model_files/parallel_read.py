"""Files that torch has written, of which torch reads only what they say of their tensors; the values are read by us.

``torch.load`` copies one tensor after the other in one thread. Much of that time the system takes to hand out the
memory they go to, which several threads can ask for at a time. So the bytes of a large file are read into its tensors
by whoever hashes it anyway; or, for a model, the tensors are views of the mapped file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections import OrderedDict
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.model_files.torch_archive import Archive
from lockstep.storage.hashing import BLOCK, CHUNK, Digests
from lockstep.torch_internals.tensor import offset_in_file

LARGE = 1 << 24
"""Bytes from which on a file is worth it."""
_MOST_TARGETS = 1024
"""Of one call of the system (IOV_MAX)."""
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, np.ndarray)


class Outline:
    """What a file holds, with tensors whose values are still to be read.

    Raises whatever ``torch.load`` does; ``UnfitError`` when there is anything in it that has to be left to torch.
    """

    def __init__(self, file: BinaryIO, archive: Archive | None, *, mapped: bool = False) -> None:
        self._descriptor, self._archive = file.fileno(), archive
        self._size = os.fstat(self._descriptor).st_size
        self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY) if mapped and self._size else None
        self._storages: dict[int, torch.UntypedStorage] = {}
        file.seek(0)
        self.value = self._make(torch.load(file, map_location="meta", weights_only=True), {})
        """What ``torch.load`` would give."""
        self._starts = sorted(self._storages)
        self._targets = [_bytes_of(self._storages[start]) for start in self._starts]
        ends = [start + len(target) for start, target in zip(self._starts, self._targets, strict=True)]
        if any(end > start for end, start in zip(ends, self._starts[1:], strict=False)):
            raise UnfitError("tensors that lie one over the other, of which only one would be read")

    def read(self, number: int, chunk: int, hashed: bool) -> str | None:
        """Read a chunk of the file into the tensors; its hash, if wanted, taken while it is in the cache."""
        place, end = number * chunk, min((number + 1) * chunk, self._size)
        digests = Digests(chunk) if hashed else None
        while place < end:
            targets = self._targets_from(place, min(end, place + CHUNK))
            got = os.preadv(self._descriptor, targets, place)
            if not got:
                break  # it has become shorter, which its hash tells
            place += got
            for target in targets:
                if digests is not None:
                    digests.update(target[:got])
                got -= min(got, len(target))
        return None if digests is None else digests.finish()[0]

    def _targets_from(self, place: int, end: int) -> list[memoryview]:
        """Where these bytes go, or the first of them: into tensors, or, between two of them, nowhere."""
        targets: list[memoryview] = []
        number = bisect_right(self._starts, place)
        while place < end and len(targets) < _MOST_TARGETS:
            if number and place < self._starts[number - 1] + len(self._targets[number - 1]):
                within = place - self._starts[number - 1]
                target = self._targets[number - 1][within : within + end - place]
            else:
                upto = min(end, self._starts[number]) if number < len(self._starts) else end
                target = memoryview(bytearray(min(BLOCK, upto - place)))
                number += place + len(target) == upto
            targets.append(target)
            place += len(target)
        return targets

    def _make(self, value: Any, made: dict[int, Any]) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if id(value) not in made:  # what was one object stays one
            if kind is Tensor or kind is nn.Parameter:
                found: Any = self._tensor(value)
                found = found if kind is Tensor else nn.Parameter(found.detach(), value.requires_grad)
            elif kind is dict or kind is OrderedDict:
                found = kind((key, self._make(item, made)) for key, item in value.items())
                if kind is OrderedDict:  # a module's state dict carries the versions of its parts beside its items
                    vars(found).update((key, self._make(item, made)) for key, item in vars(value).items())
            elif kind in (list, tuple):
                found = kind(self._make(item, made) for item in value)
            else:
                raise UnfitError(f"a {kind.__name__}")
            made[id(value)] = found
        return made[id(value)]

    def _tensor(self, value: Tensor) -> Tensor:
        if value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
            raise UnfitError("an unusual tensor")
        memory = value.untyped_storage()
        start, size = offset_in_file(memory), memory.nbytes()
        if start is None or self._archive is None or not self._archive.holds(start, size):
            raise UnfitError("a tensor whose bytes are not in the file, or not to be found")
        storage = self._storages.get(start)
        if storage is None:
            storage = self._storage(start, size)
            if size:
                self._storages[start] = storage
        elif storage.nbytes() != size:
            raise UnfitError("one storage of two sizes")
        tensor = torch.empty(0, dtype=value.dtype)
        tensor.set_(storage, value.storage_offset(), value.shape, value.stride())
        return tensor.requires_grad_(value.requires_grad)

    def _storage(self, start: int, size: int) -> torch.UntypedStorage:
        if self._map is None or not size:
            return torch.UntypedStorage(size)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    # By its address: torch never resizes a storage again that numpy has seen.
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


class UnfitError(Exception):
    """A file that is to be read by torch alone."""
