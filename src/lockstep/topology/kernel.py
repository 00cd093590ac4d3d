"""The kernels on which training is known to hang."""

from __future__ import annotations

import platform


def old_kernel_warning(system: str = "", release: str = "") -> str | None:
    """What to tell users of a Linux kernel below 5.5, on which processes are known to hang; None elsewhere."""
    system, release = system or platform.system(), release or platform.release()
    if system != "Linux":
        return None
    numbers = release.split("-")[0].split(".")
    try:
        version = (int(numbers[0]), int(numbers[1]))
    except (IndexError, ValueError):
        return None
    if version >= (5, 5):
        return None
    return (
        f"This machine runs Linux {release}. Below 5.5 training processes are known to hang; "
        "upgrade the kernel to 5.5 or later."
    )
