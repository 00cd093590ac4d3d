"""The memory of devices and of the host: how much is free, and giving it back."""

from __future__ import annotations

import gc
import math
import resource
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from lockstep.config.sizes import in_bytes
from lockstep.errors import ConfigError
from lockstep.host import cgroups


def empty_cache() -> None:
    """Collect garbage and empty the accelerator's cache, where there is one."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def get_max_memory(max_memory: Mapping[int | str, int | float | str] | None = None) -> dict[int | str, int]:
    """Bytes that are free on each device and on the host, devices first.

    With ``max_memory``, those limits instead: sizes such as ``"10GiB"`` as bytes, devices in the order in which they
    are to be filled.
    """
    if max_memory is not None:
        return _ordered({key: _limit(value, f"max_memory[{key!r}]") for key, value in max_memory.items()})
    found: dict[int | str, int] = {}
    if not torch.accelerator.is_available():
        found["cpu"] = free_host_memory()
    elif (kind := torch.accelerator.current_accelerator()) is not None and kind.type == "mps":
        found["mps"] = free_host_memory()  # one memory for both
    else:
        for index in range(torch.accelerator.device_count()):
            free = free_device_memory(torch.device(kind.type if kind else "cuda", index))
            if free is not None:
                found[index] = free
        found["cpu"] = free_host_memory()
    return found


def free_device_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device; None when it does not tell."""
    module = getattr(torch, device.type, None)
    with suppress(Exception):  # a device in another process's exclusive use, a driver that is too old
        return int(module.mem_get_info(device)[0])  # type: ignore[union-attr]
    return None


def free_host_memory() -> int:
    """Bytes that this process can still get from the host, by the machine, its control group and its own limits."""
    import psutil  # loaded where it is used, as few scripts do

    free = [int(psutil.virtual_memory().available)]
    group = cgroups.free_memory()
    if group is not None:
        free.append(group)
    used = _own_sizes()
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        allowed = resource.getrlimit(limit)[0]
        if allowed != resource.RLIM_INFINITY and name in used:
            free.append(max(0, allowed - used[name]))
    return min(free)


def _own_sizes() -> dict[str, int]:
    """What the kernel counts for this process, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.startswith("Vm"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def _limit(value: int | float | str, name: str) -> int:
    """In bytes; a share of what is free, such as ``0.9 * free``, is a number with a fraction."""
    return in_bytes(int(value) if isinstance(value, float) and math.isfinite(value) and value >= 0 else value, name)  # type: ignore[arg-type]


def _ordered(sizes: dict[int | str, int]) -> dict[int | str, int]:
    known = sorted(key for key in sizes if isinstance(key, int))
    named = [key for key in ("mps", "cpu", "disk") if key in sizes]
    strange = [key for key in sizes if key not in known and key not in named]
    if strange:
        raise ConfigError(
            f"max_memory names {', '.join(map(repr, strange))}. Allowed: device numbers, 'mps', 'cpu' and 'disk'."
        )
    return {key: sizes[key] for key in (*known, *named)}
