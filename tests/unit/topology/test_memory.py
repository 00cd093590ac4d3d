"""How much memory is free, and limits that are given instead."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.topology.memory import free_host_memory, get_max_memory


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
    given = {"disk": "1TB", "cpu": "10GiB", 1: "200MB", 0: 0.9 * 6}
    assert list(get_max_memory(given).items()) == [(0, 5), (1, 200_000_000), ("cpu", 10 << 30), ("disk", 10**12)]


@pytest.mark.parametrize("bad", ["much", "", "10 PB", -1, -0.5, math.nan, math.inf, True, None])
def test_what_is_no_size(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"max_memory\[0\]=.* is not a size"):
        get_max_memory({0: bad})  # type: ignore[dict-item]


def test_what_is_no_device() -> None:
    with pytest.raises(ConfigError, match="names 'gpu'"):
        get_max_memory({"gpu": 1})
