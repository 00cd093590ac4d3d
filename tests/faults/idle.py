"""Threads that compute while their process has nothing to do, for tests of what a recovery leaves behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def busy_threads(seconds: float = 1.0) -> list[str]:
    """The threads of this process, but for the caller's, that computed for a fifth of these seconds or more."""
    before = _used()
    time.sleep(seconds)
    return [
        f"{name} (thread {thread})"
        for (thread, name), used in _used().items()
        if thread != os.getpid() and used - before.get((thread, name), 0.0) > 0.2 * seconds
    ]


def _used() -> dict[tuple[int, str], float]:
    """Processor time of each thread."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        fields = rest.split()
        found[int(task.name), name] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found
