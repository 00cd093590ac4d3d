"""The version of the Linux kernel."""

from __future__ import annotations

import platform

from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding
from lockstep.topology.kernel import old_kernel_warning


def version(context: DoctorContext) -> Finding:
    """At least 5.5, where processes do not hang."""
    system, release = platform.system(), platform.release()
    seen = f"{system} {release}"
    if system != "Linux":
        return Finding(check="kernel", status="skipped", what=f"{seen}, not Linux")
    if old_kernel_warning(system, release) is None:
        return Finding(check="kernel", status="ok", what=seen, data={"release": release})
    return Finding(
        check="kernel",
        status="warning",
        what=f"{seen}, below 5.5",
        why="training processes are known to hang on Linux kernels below 5.5",
        fix="upgrade the kernel to 5.5 or later",
        data={"release": release},
    )
