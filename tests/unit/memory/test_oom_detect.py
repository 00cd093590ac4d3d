"""Which exceptions are a lack of memory, by type and text, and how much was asked for."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest
import torch

from lockstep.errors import OutOfMemory, PeerFailure
from lockstep.memory.oom_detect import describe, is_out_of_memory, requested_bytes

CUDA = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 7.79 GiB of which 1.00 GiB is free."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "314572800 bytes. Error code 12 (Cannot allocate memory)"
)
LACK: list[BaseException] = [
    torch.OutOfMemoryError(CUDA),
    RuntimeError(CUDA),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB."),
    RuntimeError("XPU out of memory. Tried to allocate 20.00 MiB."),
    RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 8.00 GiB total capacity)"),
    RuntimeError(
        "MPS backend out of memory (MPS allocated: 1 GB, max allowed: 2 GB). Tried to allocate 20 MB on pool."
    ),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError(CPU),
    RuntimeError("unable to mmap 314572800 bytes from file </torch_1_2_0>: Cannot allocate memory (12)"),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
    MemoryError("Unable to allocate 300. MiB for an array with shape (314572800,) and data type uint8"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    OutOfMemory("No executable batch size found, reached zero."),
    PeerFailure("Rank 1 failed: OutOfMemoryError: CUDA out of memory. While averaging gradients, this rank leaves"),
    PeerFailure("Rank 1 failed: MemoryError. While averaging gradients, this rank leaves too."),
    PeerFailure(f"The step failed on another rank (rank 1: RuntimeError: {CPU})."),
]
OTHER: list[BaseException] = [
    ValueError("CUDA out of memory"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    OSError(errno.ENOENT, "No such file"),
    PeerFailure("Rank 1 failed: ValueError: bad.\n\nOn rank 1:\n  raise ValueError  # not CUDA out of memory"),
    KeyError("memory"),
]


@pytest.mark.parametrize("error", LACK, ids=str)
def test_a_lack_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHER, ids=str)
def test_something_else(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_nothing_is_no_lack_of_memory() -> None:
    assert not is_out_of_memory(None)


def caught(cause: bool, hidden: bool = False) -> BaseException:
    try:
        try:
            raise MemoryError("deep down")
        except MemoryError as error:
            if cause:
                raise ValueError("the sample cannot be read") from error
            if hidden:
                raise ValueError("nothing to do with it") from None
            raise ValueError("while handling it")  # noqa: B904  # on purpose: Python notes what was being handled
    except ValueError as error:
        return error


def test_what_it_came_from_counts() -> None:
    assert is_out_of_memory(caught(cause=True))
    assert is_out_of_memory(caught(cause=False))
    assert not is_out_of_memory(caught(cause=False, hidden=True))


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert not is_out_of_memory(first)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (CUDA, 1536 << 20),
        (CPU, 314572800),
        ("Unable to allocate 300. MiB for an array", 300 << 20),
        ("unable to mmap 4096 bytes from file", 4096),
        ("MPS backend out of memory. Tried to allocate 20 MB on private pool", 20 << 20),
        ("std::bad_alloc", None),
    ],
)
def test_how_much_was_asked_for(text: str, size: int | None) -> None:
    assert requested_bytes(RuntimeError(text)) == size


def test_in_words() -> None:
    assert describe(RuntimeError(CPU)) == " (tried to allocate 300.0 MiB)"
    assert describe(RuntimeError("std::bad_alloc")) == " (std::bad_alloc)"
    assert describe(MemoryError()) == describe(None) == ""


REAL = """
import resource, sys
import numpy, torch
from lockstep.memory.oom_detect import is_out_of_memory, requested_bytes
kind, name = {"AS": (resource.RLIMIT_AS, "VmSize:"), "DATA": (resource.RLIMIT_DATA, "VmData:")}[sys.argv[1]]
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))
resource.setrlimit(kind, (used + (100 << 20), resource.RLIM_INFINITY))
size = 200 << 20
for make in (lambda: torch.empty(size, dtype=torch.uint8), lambda: bytearray(size),
             lambda: numpy.empty(size, dtype=numpy.uint8), lambda: torch.zeros(1).expand(size // 4).clone()):
    try:
        make()
    except BaseException as error:
        assert is_out_of_memory(error), error
        assert requested_bytes(error) in (None, size), error
    else:
        raise AssertionError("this fitted")
"""


@pytest.mark.parametrize("limit", ["AS", "DATA"])
def test_what_the_allocators_really_raise(limit: str) -> None:
    command = [sys.executable, "-c", REAL, limit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
