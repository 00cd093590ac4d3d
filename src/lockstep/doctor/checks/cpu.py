"""Cores: what this process is tied to, what its control group allows, and how many threads each rank will start."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding
from lockstep.host import cgroups
from lockstep.host.hardware import usable_cores


def cores(context: DoctorContext) -> Finding:
    """Whether there is a core for each rank."""
    present = os.cpu_count() or 1
    tied = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    share, usable = cgroups.cores(), usable_cores()
    data = {"present": present, "affinity": tied, "cgroup": share, "usable": usable}
    reasons = [f"{present} present"]
    if tied < present:
        reasons.append(f"this process is tied to {tied}")
    if share is not None and share < tied:
        reasons.append(f"the control group allows the time of {share:g}")
    summary = f"{usable} usable ({', '.join(reasons)})"
    if usable >= context.processes:
        return Finding(check="cores", status="ok", what=summary, data=data)
    return Finding(
        check="cores",
        status="warning",
        what=f"{summary} for {context.processes} processes",
        why="ranks that share a core take turns, and all wait for the last one",
        fix="ask for more (--cpus-per-task in SLURM, --cpus in docker), lift the tie (mpirun --bind-to none), or start "
        "fewer processes",
        data=data,
    )


def requested_threads(environ: Mapping[str, str]) -> int | None:
    """The threads that the environment asks for; None where it does not, or not in a number."""
    text = environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def threads(context: DoctorContext) -> Finding:
    """Whether the threads of all ranks together fit the cores."""
    usable = usable_cores()
    text = context.environ.get("OMP_NUM_THREADS", "")
    each = requested_threads(context.environ)
    data = {"OMP_NUM_THREADS": each, "cores": usable, "processes": context.processes}
    if text and each is None:
        return Finding(
            check="threads",
            status="error",
            what=f"OMP_NUM_THREADS={text!r} is not a number of threads",
            why="each library reads it in its own way, and mostly ignores it",
            fix=f"export OMP_NUM_THREADS={max(1, usable // context.processes)}",
            data=data,
        )
    if each is None:
        if context.processes == 1:
            what = f"OMP_NUM_THREADS is not set: torch takes all {usable} cores, and launchers set it for their ranks"
            return Finding(check="threads", status="ok", what=what, data=data)
        each = usable
    together = each * context.processes
    ranks = f"{context.processes} process{'es' if context.processes > 1 else ''}"
    summary = f"{ranks} of {each} thread{'s' if each > 1 else ''} on {usable} cores"
    if together <= max(usable, context.processes):
        return Finding(check="threads", status="ok", what=summary, data=data)
    return Finding(
        check="threads",
        status="warning",
        what=summary,
        why="more threads than cores get in each other's way; several times as slow is common",
        fix=f"export OMP_NUM_THREADS={max(1, usable // context.processes)}",
        data=data,
    )
