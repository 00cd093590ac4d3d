"""Giving memory back, and saying how much there is."""

from __future__ import annotations

import ctypes
import gc
import resource
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from lockstep.config.sizes import in_bytes, in_words
from lockstep.errors import ConfigError
from lockstep.memory.cache import clear_device_cache, free_host_memory, get_max_memory, release_memory


def test_released_objects_are_gone() -> None:
    model = nn.Linear(2, 2)
    gone = weakref.ref(model)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    model, optimizer = release_memory(model, optimizer)  # type: ignore[assignment]
    assert model is None
    assert optimizer is None
    assert gone() is None


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this allocator is not glibc's")
def test_what_the_hosts_allocator_keeps_is_given_back() -> None:
    held = [torch.ones(25_000) for _ in range(1000)]  # below the size from which each block has a mapping of its own
    last = torch.ones(25_000)  # what lies below it cannot be cut off
    full = psutil.Process().memory_info().rss
    (held,) = release_memory(held)  # type: ignore[assignment]
    clear_device_cache(garbage_collection=True)
    assert full - psutil.Process().memory_info().rss > 80 * 1_000_000
    assert len(last) == 25_000


def test_the_cache_can_be_cleared_with_and_without_collecting() -> None:
    cycle: list[object] = []
    cycle.append(cycle)

    class Marked(list):  # type: ignore[type-arg]
        """A list that can be referred to weakly."""

    marked = Marked()
    marked.append(marked)
    gone = weakref.ref(marked)
    del marked
    gc.disable()
    try:
        clear_device_cache()
        assert gone() is not None
        clear_device_cache(garbage_collection=True)
        assert gone() is None
    finally:
        gc.enable()


def test_what_is_free() -> None:
    found = get_max_memory()
    assert list(found)[-1] in ("cpu", "mps")
    assert all(size > 0 for size in found.values())


def test_a_limit_of_the_process_counts() -> None:
    used = next(
        int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line
    )
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (500 << 20), before[1]))
    try:
        assert 400 << 20 < free_host_memory() <= 600 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_limits_that_are_given() -> None:
    given = {"disk": "1TB", "cpu": "10GiB", 1: "200MB", 0: 5}
    assert list(get_max_memory(given).items()) == [(0, 5), (1, 200_000_000), ("cpu", 10 << 30), ("disk", 10**12)]


@pytest.mark.parametrize("bad", ["much", "", "10 PB", -1, 1.5, True, None])
def test_what_is_no_size(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"max_memory\[0\]=.* is not a size"):
        get_max_memory({0: bad})  # type: ignore[dict-item]


def test_what_is_no_device() -> None:
    with pytest.raises(ConfigError, match="names 'gpu'"):
        get_max_memory({"gpu": 1})


def test_sizes_are_read_and_written() -> None:
    assert in_bytes("1.5 KiB", "x") == 1536
    assert [in_words(size) for size in (5, 1536, 3 << 30, 5 << 40)] == ["5 bytes", "1.5 KiB", "3.0 GiB", "5.0 TiB"]
