"""What the shell lets a process have: open files, locked memory, processes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding

_FILES = 4096
_LOCKED = 64 << 20
_SPARE = 500
"""Threads and processes that a small job needs beyond what already runs."""


def all_of_them(context: DoctorContext) -> Iterator[Finding]:
    """One finding for each limit."""
    yield _files()
    yield _locked()
    yield _processes()


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    data = {"soft": _number(soft), "hard": _number(hard)}
    if soft == resource.RLIM_INFINITY or soft >= _FILES:
        return Finding(check="open files", status="ok", what=f"{_limit_text(soft)} (ulimit -n)", data=data)
    within = hard == resource.RLIM_INFINITY or hard >= _FILES
    return Finding(
        check="open files",
        status="warning",
        what=f"{_limit_text(soft)} may be open at once (ulimit -n)",
        why="every pair of ranks, every loader worker and every batch in flight needs some: 'Too many open files'",
        fix="ulimit -n 65536" if within else "raise it for your user: nofile in /etc/security/limits.conf",
        data=data,
    )


def _locked() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    data = {"soft": _number(soft), "hard": _number(hard)}
    cards = _infiniband()
    enough = soft == resource.RLIM_INFINITY or soft >= _LOCKED
    if enough or not cards:
        rest = "" if enough else "; that is little, and matters only with InfiniBand, which is not here"
        what = f"{_limit_text(soft, 'bytes')} (ulimit -l){rest}"
        return Finding(check="locked memory", status="ok", what=what, data=data)
    return Finding(
        check="locked memory",
        status="error",
        what=f"{_limit_text(soft, 'bytes')} (ulimit -l), and this machine has InfiniBand ({', '.join(cards)})",
        why="InfiniBand has to lock its buffers: NCCL fails with 'Cannot allocate memory' in ibv_reg_mr",
        fix="ulimit -l unlimited; for good: memlock in /etc/security/limits.conf, and LimitMEMLOCK=infinity in "
        "slurmd.service",
        data=data,
    )


def _infiniband() -> list[str]:
    folder = Path("/sys/class/infiniband")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _processes() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    data = {"soft": _number(soft), "hard": _number(hard)}
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        limit = "not limited" if soft == resource.RLIM_INFINITY else f"{soft}, which does not bind root"
        return Finding(check="processes", status="ok", what=f"{limit} (ulimit -u)", data=data)
    running = _threads_of_user()
    data["running"] = running
    summary = f"{running} of {soft} threads and processes of this user are running (ulimit -u)"
    if soft - running >= _SPARE:
        return Finding(check="processes", status="ok", what=summary, data=data)
    return Finding(
        check="processes",
        status="warning",
        what=summary,
        why="every rank has a dozen threads, every loader worker is a process: 'Resource temporarily unavailable'",
        fix="raise it for your user: nproc in /etc/security/limits.conf",
        data=data,
    )


def _threads_of_user() -> int:
    """Threads count against the limit like processes do."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.getuid():
                count += len(os.listdir(folder / "task"))
        except OSError:
            continue
    return count


def _number(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _limit_text(value: int, unit: str = "") -> str:
    if value == resource.RLIM_INFINITY:
        return "not limited"
    return f"{value} {unit}".strip()
