"""Files in the safetensors format: eight bytes of length, a JSON header, the tensors' bytes.

Written as a stream, one tensor's memory after the other, so that no copy of the model is made and a sink sees every
byte as it goes by. Read by checking the whole header before any tensor is touched.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.raw_bytes import as_bytes
from lockstep.errors import CheckpointError
from lockstep.model_files.tensor_entry import InFile
from lockstep.model_files.writer import PLAIN, Opened, Sink
from lockstep.storage.manifest import unique_names
from lockstep.storage.open_files import Opener, open_regular

LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
_LONG, _SLACK = 1 << 25, 1_000_000
"""Bytes of a header, and brackets in it, that need no tensors to explain them: texts of the metadata may have some."""
_WIDEST = 2**63
_MOST_DIMENSIONS = 64
_CHUNK = 2**30
"""Bytes per system call, which Linux limits to a little under 2**31."""

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


# ---------------------------------------------------------------- writing


def _refusal(name: str, value: Any) -> str | None:
    """Why the format cannot hold this entry of a state dict; None when it can."""
    if not isinstance(name, str) or name == "__metadata__":
        return f"{name!r} cannot be a name there"
    if not isinstance(value, Tensor):
        return f"{name} is a {type(value).__name__}, not a tensor"
    if value.layout != torch.strided or value.is_quantized:
        return f"{name} is a {'quantized' if value.is_quantized else 'sparse'} tensor"
    if value.dtype not in _NAMES:
        return f"{name} is of {value.dtype}"
    return None


def write(tensors: Mapping[str, Tensor], path: Path, sink: Sink = PLAIN) -> None:
    """Write a file with these tensors; what is shared between them is not kept."""
    refuse(tensors, path.name)
    with sink.open(path) as file:
        write_to(tensors, file)


def refuse(tensors: Mapping[str, Any], name: str) -> None:
    """Raise for what the format cannot hold."""
    if unfit := [text for key, value in tensors.items() if (text := _refusal(key, value))]:
        raise CheckpointError(
            f"{name}: the safetensors format holds plain tensors only: {'; '.join(unfit[:5])}. "
            "Save with safe_serialization=False, or leave them out of the state dict."
        )


def write_to(tensors: Mapping[str, Tensor], file: Opened) -> None:
    """Write the tensors' bytes, one tensor's memory after the other."""
    refuse(tensors, "The state dict")
    # Wide elements first: then every tensor starts at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(f"The names of {len(tensors)} tensors are too much for one file's header.")
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        if tensor.numel():
            file.write(raw(tensor))


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; its own memory where it is on the host and contiguous."""
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return as_bytes(host).numpy().data


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class SafeTensor(InFile):
    """One tensor of a file."""

    file: SafeFile = field(repr=False)
    start: int
    """Where its first byte is, from the start of the file."""
    nbytes: int

    def read(self) -> Tensor:
        """A view of the mapped file; changing it changes memory only."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        count = math.prod(self.shape)
        return torch.frombuffer(self.file.mapped(), dtype=self.dtype, count=count, offset=self.start).view(self.shape)

    def read_into(self, target: Tensor) -> None:
        """Read straight into the target's memory where that can be: twice as fast as a mapping, and no page stays."""
        if not self.nbytes:
            return
        target = target.detach()
        plain = type(target) is Tensor and target.device.type == "cpu" and target.is_contiguous()
        if plain and target.dtype == self.dtype and not target.is_neg() and not target.is_conj():
            self.file.read_at(self.start, as_bytes(target).numpy().data)
        else:
            between = torch.empty(self.shape, dtype=self.dtype)
            self.read_into(between)
            target.copy_(between)


class SafeFile:
    """A file whose header has been checked: each tensor lies inside it, and nothing else does."""

    def __init__(self, path: Path, opener: Opener = open_regular) -> None:
        self.path = path
        self._descriptor = opener(path)
        self._map: mmap.mmap | None = None
        try:
            self.entries = {entry.name: entry for entry in self._read_header()}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the file; tensors that were read from it stay valid."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.rest()

    def rest(self) -> None:
        """Hold no memory until something is read again."""
        self._map = None  # the tensors of it, if any, keep it alive

    def mapped(self) -> mmap.mmap:
        """The whole file as memory, of which changes stay in this process."""
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)
        return self._map

    def read_at(self, start: int, target: memoryview) -> None:
        """Fill the target with the bytes from there on."""
        done = 0
        while done < len(target):
            got = os.preadv(self._descriptor, [target[done : done + _CHUNK]], start + done)
            if not got:
                raise self._bad("has become shorter while it was read")
            done += got

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {what}. It is damaged, not written to its end, or no safetensors file.")

    def _read_header(self) -> Iterable[SafeTensor]:
        size = os.fstat(self._descriptor).st_size
        prefix = os.pread(self._descriptor, 8, 0)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise self._bad(f"has {size} bytes, which is too short for its header")
        if length > LONGEST_HEADER:
            raise self._bad(f"has a header of {length} bytes")
        text = bytearray(length)
        self.read_at(8, memoryview(text))
        tensors = text.count(b'"data_offsets"')
        if text.count(b"{") + text.count(b"[") > _SLACK + 3 * tensors or length > _LONG + 4096 * tensors:
            raise self._bad(f"has a header of {length} bytes that tells of {tensors} tensors")
        try:
            header = json.loads(text.decode(), object_pairs_hook=unique_names)
        except (ValueError, RecursionError):
            raise self._bad("has a header that is not JSON") from None
        if not isinstance(header, dict) or text[:1] != b"{":
            raise self._bad("has a header that is not a table")
        words = header.pop("__metadata__", None)
        if words is None:
            words = {}
        if not isinstance(words, dict) or not all(isinstance(word, str) for word in words.values()):
            raise self._bad("has a header whose metadata are not texts by name")
        found = [self._entry(name, value, 8 + length) for name, value in header.items()]
        end = 8 + length
        for entry in sorted(found, key=lambda entry: (entry.start, entry.nbytes)):
            if entry.start != end:
                raise self._bad(f"has a header that leaves a gap or an overlap before {entry.name!r}")
            end += entry.nbytes
        if end != size:
            raise self._bad(f"has {size} bytes where its header tells of {end}")
        return found

    def _entry(self, name: str, value: Any, base: int) -> SafeTensor:
        try:
            dtype, shape, (start, end) = _DTYPES[value["dtype"]], value["shape"], value["data_offsets"]
            whole = all(type(number) is int and 0 <= number < _WIDEST for number in (start, end, *shape))
        except (KeyError, TypeError, ValueError):
            raise self._bad(f"has a header with an entry {name[:200]!r} that cannot be read") from None
        fits = whole and len(shape) <= _MOST_DIMENSIONS and math.prod(shape) * dtype.itemsize == end - start
        if not fits:
            raise self._bad(f"has a header whose entry {name[:200]!r} contradicts itself")
        return SafeTensor(name, tuple(shape), dtype, self, base + start, end - start)
