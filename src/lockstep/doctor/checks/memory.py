"""Memory: what the control group allows, and the shared memory that loader workers and NCCL use."""

from __future__ import annotations

import os
import shutil

from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding
from lockstep.host import cgroups

SHARED = "/dev/shm"
_ENOUGH = 1 << 30
_EACH = 1 << 30


def shared(context: DoctorContext) -> Finding:
    """Room in /dev/shm: batches of loader workers go through it, and NCCL's buffers; containers often get 64 MB."""
    if not os.path.isdir(SHARED):
        return Finding(
            check="shared memory",
            status="warning",
            what=f"there is no {SHARED}",
            why="loader workers hand their batches over through it; without it they end with a bus error",
            fix=f"mount -t tmpfs -o size=8G tmpfs {SHARED}",
        )
    usage = shutil.disk_usage(SHARED)
    data = {"total": usage.total, "free": usage.free}
    summary = f"{gib(usage.free)} free of {gib(usage.total)} in {SHARED}"
    if usage.free >= _ENOUGH:
        return Finding(check="shared memory", status="ok", what=summary, data=data)
    return Finding(
        check="shared memory",
        status="warning",
        what=summary,
        why="loader workers hand their batches over through it, and NCCL keeps buffers there: where it is full they "
        "end with a bus error",
        fix="docker run --shm-size=8g, in Kubernetes an emptyDir of medium Memory there, or DataLoader(num_workers=0)",
        data=data,
    )


def allowed(context: DoctorContext) -> Finding:
    """The memory limit of the control groups: what is above it is killed without a message."""
    import psutil

    limit, memory = cgroups.memory(), psutil.virtual_memory()
    data = {"limit": limit, "total": memory.total, "available": memory.available}
    limited = limit is not None and limit < memory.total
    summary = f"{gib(memory.available)} available of {gib(memory.total)}"
    summary += f"; the control group allows {gib(limit)}" if limited and limit else "; no control group limits it"
    usable = min(limit or memory.total, memory.available)
    if usable >= _EACH * context.processes:
        return Finding(check="memory", status="ok", what=summary, data=data)
    return Finding(
        check="memory",
        status="warning",
        what=f"{summary}, for {context.processes} process{'es' if context.processes > 1 else ''}",
        why="torch alone takes about half a GiB in each; what goes above the limit is killed by the kernel (signal 9), "
        "without a message of its own",
        fix="ask for more (--mem in SLURM, --memory in docker, resources.limits in Kubernetes), or end what uses it",
        data=data,
    )


def gib(count: int) -> str:
    """A number of bytes as people say it."""
    return f"{count / 2**30:.1f} GiB"
