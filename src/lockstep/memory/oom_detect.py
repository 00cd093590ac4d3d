"""Is this exception a lack of memory? By its type and its text, and by what it came from."""

from __future__ import annotations

import errno
import re

import torch

from lockstep.config.sizes import in_words
from lockstep.errors import OutOfMemory, PeerFailure, walk_chain

_TEXTS = re.compile(
    r" out of memory\b"  # CUDA, HIP, XPU, NPU, MPS, and "CUDA error: out of memory"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|Cannot allocate memory"  # ENOMEM, as torch's shared memory and the operating system put it
    r"|std::bad_alloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_NOT_SUPPORTED\."  # what cuDNN says when its workspace does not fit
    r"|PT_DEVMEM Allocation failed"  # HPU
)
_TYPE_NAMES = re.compile(r"\b(MemoryError|_ArrayMemoryError|OutOfMemoryError|OutOfMemory)\b")
_REQUEST = re.compile(
    r"[Tt]ried to allocate (?P<size>[\d.]+) ?(?P<unit>bytes|[KMGT]i?B)|"
    r"[Uu]nable to (?:allocate|mmap) (?P<size2>[\d.]+) ?(?P<unit2>bytes|[KMGT]i?B)"
)
_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a device or the host ran out of memory, on this rank or, as a ``PeerFailure`` tells it, on another."""
    return any(_is_one(part) for part in walk_chain(error))


def requested_bytes(error: BaseException) -> int | None:
    """How much memory was asked for when there was not enough; None when the error does not say."""
    for part in walk_chain(error):
        found = _REQUEST.search(str(part))
        if found:
            unit = found["unit"] or found["unit2"]
            # Torch's MiB and numpy's MiB are the same; an "MB" in an older text means MiB, too.
            scale = _UNITS["B" if unit == "bytes" else unit[0]]
            return int(float(found["size"] or found["size2"]) * scale)
    return None


def describe(error: BaseException | None) -> str:
    """What was asked for, or else the error's first line, in parentheses; empty when there is nothing to say."""
    if error is None:
        return ""
    size = requested_bytes(error)
    if size is not None:
        return f" (tried to allocate {in_words(size)})"
    text = str(root_of(error)).strip()
    return f" ({text.splitlines()[0][:160]})" if text else ""


def root_of(error: BaseException) -> BaseException:
    """The exception of the chain that is the lack of memory itself; the error where there is none."""
    return next((part for part in walk_chain(error) if _is_one(part)), error)


def _is_one(error: BaseException) -> bool:
    if isinstance(error, PeerFailure):
        first = str(error).partition("\n")[0]  # what follows is a traceback, with anybody's words in it
        return bool(_TEXTS.search(first) or _TYPE_NAMES.search(first))
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, OutOfMemory)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_TEXTS.search(str(error)))
