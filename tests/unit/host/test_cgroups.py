"""Limits of control groups, in trees of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.host import cgroups


def make_tree(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], own: str) -> None:
    """A tree of groups with these files, and a process in these groups of it."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    groups = folder / "proc"
    groups.write_text(own)
    monkeypatch.setattr(cgroups, "TREE", folder / "cgroup")
    monkeypatch.setattr(cgroups, "OWN", groups)


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({"cpu.max": "150000 100000", "memory.max": "1073741824"}, 1.5, 2**30),
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        ({"a/cpu.max": "max 100000", "cpu.max": "300000 100000", "a/memory.max": "5", "memory.max": "9"}, 3.0, 5),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, None),
        ({"memory/b/memory.limit_in_bytes": "7", "memory/memory.limit_in_bytes": "9223372036854771712"}, None, 7),
        ({}, None, None),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: float | None, memory: int | None
) -> None:
    make_tree(tmp_path, monkeypatch, files, "4:memory:/b\n2:cpuacct:/\n1:cpu:/\n0::/a\n")
    assert cgroups.cores() == cores
    assert cgroups.memory() == memory


def test_no_tree_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "missing")
    assert cgroups.cores() is None
    assert cgroups.memory() is None


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"a/memory.max": "1000", "a/memory.current": "400", "a/memory.stat": "anon 5\ninactive_file 100"}, 700),
        ({"a/memory.max": "max", "a/memory.current": "400", "a/memory.stat": ""}, None),
        (
            {
                "a/memory.max": "1000",
                "a/memory.current": "400",
                "a/memory.stat": "inactive_file 0",
                "memory.max": "900",
                "memory.current": "880",
                "memory.stat": "inactive_file 10",
            },
            30,
        ),
        ({"a/memory.max": "10", "a/memory.current": "40", "a/memory.stat": ""}, 0),
        ({}, None),
    ],
)
def test_what_the_groups_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: int | None
) -> None:
    make_tree(tmp_path, monkeypatch, files, "0::/a\n")
    assert cgroups.free_memory() == free
