"""Giving memory back."""

from __future__ import annotations

import ctypes
import gc
import weakref

import psutil
import pytest
import torch
from torch import nn

from lockstep.config.sizes import in_bytes, in_words
from lockstep.memory.cache import clear_device_cache, release_memory


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


def test_sizes_are_read_and_written() -> None:
    assert in_bytes("1.5 KiB", "x") == 1536
    assert [in_words(size) for size in (5, 1536, 3 << 30, 5 << 40)] == ["5 bytes", "1.5 KiB", "3.0 GiB", "5.0 TiB"]
