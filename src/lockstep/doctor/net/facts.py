"""What this rank says of itself at the rendezvous."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import lockstep
from lockstep.doctor.checks import cpu
from lockstep.doctor.net.results import RankInfo
from lockstep.doctor.net.tcp_probe import Listener
from lockstep.host import cgroups, interfaces
from lockstep.host.network import route_to
from lockstep.topology.topology import Topology


def choose(topology: Topology, environ: Mapping[str, str]) -> interfaces.InterfaceChoice:
    """Where the backend of this rank will listen."""
    on_device = topology.backend is not None and "nccl" in topology.backend
    return (interfaces.for_nccl if on_device else interfaces.for_gloo)(environ, interfaces.read())


def introduce(
    topology: Topology,
    environ: Mapping[str, str],
    listener: Listener,
    *,
    script: Path | None = None,
) -> RankInfo:
    """This rank: where the others reach it, over what, and what must be the same on all nodes."""
    present = interfaces.read()
    choice = choose(topology, environ)
    holder = None if choice.interface is None else next((i for i in present if i.name == choice.interface), None)
    return RankInfo(
        rank=topology.rank,
        host=socket.gethostname(),
        machine=_machine(),
        node=topology.node_rank,
        local_rank=topology.local_rank,
        device=str(topology.device),
        **_device(topology),
        backend=topology.backend or "none",
        address=choice.address,
        interface=choice.interface,
        reason=choice.reason,
        problem=choice.problem,
        port=listener.port,
        token=listener.token,
        others=_ways_out(present, topology.main_address),
        speed=0 if holder is None or holder.is_loopback else holder.speed,
        mtu=0 if holder is None else holder.mtu,
        cores=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (),
        share=cgroups.cores(),
        threads=cpu.requested_threads(environ),
        versions=versions(script),
    )


def _device(topology: Topology) -> dict[str, Any]:
    if topology.device.type != "cuda":
        return {}
    import torch

    found = torch.cuda.get_device_properties(topology.device)
    return {"device_name": found.name, "device_memory": found.total_memory}


def _machine() -> str:
    """The same for processes that share a network and a start of the system, and for no others."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    return "/".join(parts)


def _ways_out(present: Sequence[interfaces.Interface], main: str | None) -> dict[str, list[str]]:
    """Interfaces that lead out, the one by which the main address is reached first."""
    route = None
    if main is not None:
        try:
            route = route_to(main, 0)[1]
        except ValueError:
            route = None
    usable = sorted((each for each in present if each.leads_out), key=lambda each: each.name != route)
    return {each.name: list(each.addresses) for each in usable}


def versions(script: Path | None = None) -> dict[str, str]:
    """What must be the same on all nodes."""
    found = {"torch": metadata.version("torch"), "python": platform.python_version(), "lockstep": lockstep.__version__}
    found["lockstep source"] = _digest_folder(Path(lockstep.__file__).parent)
    if script is not None:
        found["script"] = f"{script.name} {_digest(script)}" if script.is_file() else f"{script} is missing"
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _digest_folder(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        whole.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:12]
