"""What grows is found, and what only moves is not."""

from __future__ import annotations

import ctypes
import random
from array import array
from collections.abc import Callable

import pytest

from tests import slopes
from tests.slopes import Usage

QUIET = Usage(done=0, memory=0, objects=900, blocks=10_000, descriptors=20, threads=4, shared=0, keys=30)


def samples(count: int = 200_000, **fields: Callable[[int], float]) -> list[Usage]:
    """What a run of so many iterations would show, where these fields are functions of what was done."""
    first = int(count * 0.3)
    places = [first + number * (count - first) // (slopes.SAMPLES - 1) for number in range(slopes.SAMPLES)]
    return [
        Usage(**{**QUIET.__dict__, "done": done, **{name: round(at(done)) for name, at in fields.items()}})
        for done in places
    ]


@pytest.mark.parametrize(
    ("field", "at"),
    [
        ("memory", lambda done: 100 * done),
        ("memory", lambda done: 100 * done // (1 << 20) * (1 << 20)),  # an arena at a time
        ("blocks", lambda done: done // 100),
        ("objects", lambda done: done // 1000),
        ("descriptors", lambda done: done // 20_000),
        ("threads", lambda done: done // 20_000),
        ("keys", lambda done: done // 500),
    ],
)
def test_a_leak_is_found(field: str, at: Callable[[int], float]) -> None:
    (line,) = slopes.growth(samples(**{field: at}))
    assert line.startswith(f"{field}: ")


def test_what_happens_once_and_what_only_moves_is_no_leak() -> None:
    noise = random.Random(0)
    once = samples(memory=lambda done: (30 << 20) + (8 << 20) * (done > 120_000), threads=lambda done: done > 90_000)
    moving = samples(
        memory=lambda done: (30 << 20) + noise.uniform(-1, 1) * (1 << 20),
        blocks=lambda done: 10_000 + noise.uniform(-200, 200),
        objects=lambda done: 900 + noise.uniform(-10, 10),
    )
    assert [*slopes.growth(once), *slopes.growth(moving)] == []


def test_kept_objects_are_found_in_a_process() -> None:
    kept: list[object] = []
    found = slopes.watch(lambda done: kept.append([done]), 200)
    assert any(line.startswith("objects: 1 ") for line in slopes.growth(found)), found


def test_kept_native_memory_is_found_in_a_process() -> None:
    libc = ctypes.CDLL(None)
    libc.calloc.restype = ctypes.c_void_p
    kept = array("Q", bytes(8 * 60_000))

    def keep(done: int) -> None:
        kept[done - 1] = libc.calloc(1, 100)

    found = slopes.watch(keep, 60_000, warm_up=0.1)
    for place in kept:
        libc.free(ctypes.c_void_p(place))
    assert [line.partition(":")[0] for line in slopes.growth(found)] == ["memory"], found


def test_nothing_kept_is_nothing_found() -> None:
    found = slopes.watch(lambda done: [done], 200)
    assert slopes.growth(found) == []
