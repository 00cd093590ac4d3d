"""Fences: what can be seen of them on one machine, which is that they are there and return."""

from __future__ import annotations

import platform
import timeit
from collections.abc import Callable

import pytest

from lockstep.host import memory_fence


def test_this_machine_has_one() -> None:
    fence = memory_fence.make()
    assert fence is not None
    fence()
    fence()


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64"])
def test_only_x86_takes_a_lock_for_one(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    asked: list[str] = []

    def found(name: str) -> Callable[[], object]:
        asked.append(name)
        return lambda: None

    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(memory_fence, "by_libatomic", lambda: None)
    monkeypatch.setattr(memory_fence, "by_membarrier", found)
    assert memory_fence.make() is not None
    assert asked == (["aarch64"] if machine == "aarch64" else [])


def test_the_kernels_is_called_where_it_is_there(note: Callable[[str], None]) -> None:
    fence = memory_fence.by_membarrier(platform.machine())
    if fence is None:
        pytest.skip("this kernel has no membarrier, or forbids it")
    assert fence() == 0
    note(f"a fence of the kernel's: {min(timeit.repeat(fence, number=1000, repeat=3)) * 1000:.1f} us")


def test_none_where_nothing_is_known() -> None:
    assert memory_fence.by_membarrier("pdp11") is None
