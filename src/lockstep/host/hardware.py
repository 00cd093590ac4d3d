"""What this machine has: cores, accelerators, ports. Without torch where that can be."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from lockstep.host import cgroups

_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dri/renderD*", "accel*", "davinci[0-9]*", "dxg")
"""Where Linux shows accelerators. Where none of these exists, asking torch would only take time."""


def usable_cores() -> int:
    """Cores that this process may use: fewer than the machine has, when it is tied to some or limited by its cgroup."""
    tied = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = cgroups.cores()
    return tied if allowed is None else max(1, min(tied, int(allowed)))


def accelerators(environ: Mapping[str, str]) -> tuple[int, str]:
    """How many accelerators torch can use here, and what they are called."""
    if environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(
        next(Path("/dev").glob(pattern), None) for pattern in _DEVICE_FILES
    ):
        return 0, "none"
    import torch

    if not torch.accelerator.is_available():
        return 0, "none"
    device = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count(), "accelerator" if device is None else device.type


def is_free(port: int, address: str = "") -> bool:
    """Whether a server could listen there."""
    with closing(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except (OSError, OverflowError):
            return False
        return True


def next_free(port: int) -> int:
    """The first free port after this one; any free one when there is none."""
    for candidate in range(port + 1, min(port + 1000, 65536)):
        if is_free(candidate):
            return candidate
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
