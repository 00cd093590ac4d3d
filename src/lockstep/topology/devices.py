"""Which device this process computes on, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.config.choices import DistributedType
from lockstep.errors import ConfigError, TopologyError

_TYPES = {
    "cpu": DistributedType.MULTI_CPU,
    "cuda": DistributedType.MULTI_GPU,
    "xpu": DistributedType.MULTI_XPU,
    "npu": DistributedType.MULTI_NPU,
    "mlu": DistributedType.MULTI_MLU,
    "musa": DistributedType.MULTI_MUSA,
    "sdaa": DistributedType.MULTI_SDAA,
    "hpu": DistributedType.MULTI_HPU,
    "neuron": DistributedType.MULTI_NEURON,
}


@dataclass(frozen=True, eq=False)
class DeviceChoice:
    """A device and the reason it was chosen."""

    device: torch.device
    """The device this process computes on."""
    reason: str
    """Why this one, in words."""


def choose_device(*, cpu: bool, fixed: str | None, local_rank: int, local_world_size: int) -> DeviceChoice:
    """The device for this process: what was asked for, else this machine's accelerator, else the CPU."""
    if fixed is not None:
        try:
            return DeviceChoice(torch.device(fixed), f"set to {fixed!r}")
        except RuntimeError as error:
            raise ConfigError(f"device {fixed!r} is not known to torch: {error}") from None
    if cpu:
        return DeviceChoice(torch.device("cpu"), "cpu=True")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return DeviceChoice(torch.device("cpu"), "no accelerator is present")
    count = torch.accelerator.device_count()
    if local_world_size > count:
        raise TopologyError(
            f"{local_world_size} processes run on this machine, which has {count} {accelerator.type} device(s). "
            f"Start {count} process(es) per machine, or use the CPU with cpu=True or LOCKSTEP_USE_CPU=1."
        )
    return DeviceChoice(
        torch.device(accelerator.type, local_rank),
        f"{accelerator.type} device {local_rank} of {count} belongs to local rank {local_rank}",
    )


def distributed_type(device: torch.device, world_size: int) -> DistributedType:
    """The name of this kind of job."""
    if world_size == 1:
        return DistributedType.NO
    try:
        return _TYPES[device.type]
    except KeyError:
        raise TopologyError(
            f"{world_size} processes were started, but device type {device.type!r} has no way to talk between "
            "processes. Start one process, or use the CPU with cpu=True."
        ) from None


def backend_for(device: torch.device, asked: str | None) -> str:
    """The process group's backend: gloo for the host's tensors, the device's own beside it."""
    if asked is not None:
        known = torch.distributed.Backend.backend_list
        parts = [part.split(":")[-1].lower() for part in asked.split(",")]
        if any(part not in known for part in parts):
            raise ConfigError(f"process group backend {asked!r} is not known. Allowed: {', '.join(known)}.")
        if device.type == "cpu" and "nccl" in parts:
            raise ConfigError(
                f"process group backend {asked!r} needs a GPU, and this process uses the CPU. "
                "Leave the backend out, or set it to 'gloo'."
            )
        return asked
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{torch.distributed.get_default_backend_for_device(device)}"
