"""What the control groups of this process allow it (Linux; None where nothing is limited).

A group is limited by every group above it, and both versions of the tree are in use, often at once.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

TREE = Path("/sys/fs/cgroup")
"""Where Linux shows the groups and their limits."""
OWN = Path("/proc/self/cgroup")
"""Which of them this process is in."""


def memory() -> int | None:
    """The least memory, in bytes, that a group above this process allows."""
    texts = [*_files("memory", "memory.max"), *_files("memory", "memory.limit_in_bytes")]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def free_memory() -> int | None:
    """The least memory, in bytes, that a group above this process still has to give.

    What a group only caches files in counts as free: the kernel drops that before it refuses anything.
    """
    free = []
    for limit, use in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        counted = zip(*(_files("memory", name) for name in (limit, use, "memory.stat")), strict=False)
        for allowed, used, stat in counted:
            if allowed.isdigit() and used.isdigit():
                cached = sum(int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file "))
                free.append(max(0, int(allowed) - int(used) + cached))
    return min(free, default=None)


def cores() -> float | None:
    """The least CPU time, in cores, that a group above this process allows."""
    limits = []
    for text in _files("cpu", "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    quotas, periods = _files("cpu", "cpu.cfs_quota_us"), _files("cpu", "cpu.cfs_period_us")
    limits += [int(quota) / int(period) for quota, period in zip(quotas, periods, strict=False) if int(quota) > 0]
    return min(limits, default=None)


def _files(controller: str, name: str) -> list[str]:
    """What this file says in each group, from this process's own up to the root."""
    try:
        lines = OWN.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # The old tree has a folder for each controller, or for several that belong together.
        root = TREE / controllers if controllers else TREE
        folder = root / place.lstrip("/")
        for group in (folder, *folder.parents):
            with suppress(OSError):
                found.append((group / name).read_text(encoding="utf-8").strip())
            if group == root:
                break
    return found
