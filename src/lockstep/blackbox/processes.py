"""Whether a process lives, whether something holds it, and what it was started with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Life:
    """A process at one moment."""

    alive: bool
    """Whether it is this process that lives; one that has ended and was not yet fetched does not."""
    paused: bool = False
    """Whether a signal stopped it, or a debugger holds it."""


def started(pid: int) -> int:
    """When a process started, in the kernel's ticks; 0 when there is none, or it has ended."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
        # The second field is the program's name in parentheses and may hold anything; no later one has parentheses.
        fields = stat.rpartition(")")[2].split()
        return 0 if fields[0] in ("Z", "X", "x") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


def environ_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty when it is not ours to read."""
    try:
        entries = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}


def find_process(pid: int, began: int) -> Life:
    """The process of this number that started then; ``began`` 0 when that is not known."""
    if not os.path.isdir("/proc/self"):
        return Life(alive=True)  # nobody to ask
    now = started(pid)
    if not now or (began and now != began):
        return Life(alive=False)
    try:
        status = Path("/proc", str(pid), "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Life(alive=False)
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    held = fields.get("TracerPid", "0").strip() not in ("", "0")
    return Life(alive=True, paused=held or fields.get("State", "").strip()[:1] in ("T", "t"))
