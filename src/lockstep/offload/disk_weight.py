"""One weight in a file, which is checked each time before it is used and mapped into memory while it is."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.model_files.offload_folder import dtype_in, hash_of, weight_file
from lockstep.model_files.safetensors_file import SafeFile
from lockstep.storage.open_files import open_regular

SMALL = 1 << 16
"""Up to this many bytes are copied: a mapping costs more."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ, since Linux 5.14: brings pages into memory, and the interpreter's lock is free meanwhile."""


class DiskWeight:
    """A weight in an offload folder, or in a safetensors file. Its bytes stay the page cache's: no copy is made."""

    def __init__(
        self, name: str, path: Path, shape: tuple[int, ...], dtype: torch.dtype, start: int = 0, record: Any = None
    ) -> None:
        self.name, self.path, self.shape, self.dtype = name, path, shape, dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        """How many bytes it has."""
        self._start = start
        self._size: int | None = (record or {}).get("size")
        self._mtime: int | None = (record or {}).get("mtime_ns")
        self._hash: str | None = (record or {}).get("xxh3")
        self._accepted: tuple[int, ...] | None = None

    def read(self) -> Tensor:
        """The values. Whoever changes the tensor changes memory, not the file."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        descriptor = self._open()
        try:
            status = os.fstat(descriptor)
            self._check_size(status.st_size)
            values = self._copied(descriptor) if self.nbytes <= SMALL else self._mapped(descriptor)
            seen = _identity(status)
            if seen != self._accepted:
                self._compare(status, values)
                self._accepted = seen
        finally:
            os.close(descriptor)
        return values.view(self.shape)

    def unchanged(self) -> bool:
        """Whether the file is the one that was last read."""
        try:
            return _identity(os.stat(self.path)) == self._accepted
        except OSError:
            return False

    def _open(self) -> int:
        try:
            return open_regular(self.path)
        except CheckpointError as error:
            raise CheckpointError(
                f"The weight {self.name} was offloaded to {self.path}, which cannot be opened any more ({error}) "
                "Put the file back, or load the model again."
            ) from None

    def _check_size(self, size: int) -> None:
        expected = self._size if self._size is not None else (None if self._start else self.nbytes)
        if size < self._start + self.nbytes or (expected is not None and size != expected):
            raise self._changed(f"has {size} bytes where {expected or self._start + self.nbytes} were written")

    def _compare(self, status: os.stat_result, values: Tensor) -> None:
        """Called when the file is not known to be the one that was last read."""
        if self._hash is not None and self._accepted is None and status.st_mtime_ns == self._mtime:
            return
        found = hash_of(values.view(torch.uint8).numpy().data)
        if self._hash is not None and found != self._hash:
            raise self._changed("has other content than what was written")
        self._hash = found

    def _changed(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"The weight {self.name} was offloaded to {self.path}, and that file {what}: it has changed since. Load "
            "the model again, into an offload folder that nothing else writes to."
        )

    def _copied(self, descriptor: int) -> Tensor:
        values = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype)
        if os.preadv(descriptor, [values.view(torch.uint8).numpy().data], self._start) != self.nbytes:
            raise self._changed("has become shorter while it was read")
        return values

    def _mapped(self, descriptor: int) -> Tensor:
        lead = self._start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(descriptor, lead + self.nbytes, access=mmap.ACCESS_COPY, offset=self._start - lead)
        count = self.nbytes // self.dtype.itemsize
        if lead % self.dtype.itemsize:
            return torch.frombuffer(bytearray(mapped[lead:]), dtype=self.dtype, count=count)
        values = torch.frombuffer(mapped, dtype=self.dtype, count=count, offset=lead)
        _populate(values.data_ptr() - lead, lead + self.nbytes)
        return values


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@functools.cache
def _madvise() -> Any:
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _populate(address: int, length: int) -> None:
    """Bring the pages into memory at once. Where the kernel cannot, they come one by one as they are used."""
    function = _madvise()
    if function is not None:
        function(address, length, _POPULATE_READ)


def open_weight(name: str, entry: Mapping[str, Any], folder: Path | None) -> DiskWeight:
    """The weight of which an index tells: in a file of its own, or in a safetensors file."""
    if (file := entry.get("safetensors_file")) is not None:
        opened = SafeFile(Path(file))
        try:
            stored = opened.entries.get(entry.get("weight_name", name))
        finally:
            opened.close()
        if stored is None:
            raise CheckpointError(f"{file} does not hold {entry.get('weight_name', name)!r}.")
        return DiskWeight(name, Path(file), stored.shape, stored.dtype, stored.start)
    if folder is None:
        raise CheckpointError(f"The index says that {name} is in a file of its own, and there is no folder given.")
    return DiskWeight(
        name, weight_file(folder, name), tuple(entry.get("shape", ())), dtype_in(entry, name), record=entry
    )
