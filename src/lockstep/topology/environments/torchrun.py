"""RANK and WORLD_SIZE: set by torchrun, by ``lockstep launch``, by other launchers of that kind, or by hand."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from lockstep.errors import TopologyError
from lockstep.topology.environments import variables
from lockstep.topology.environments.placement import Placement

_SHOWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def detect(environ: Mapping[str, str]) -> bool:
    """Both or nothing: scripts for SLURM often export WORLD_SIZE alone and leave the rank to srun."""
    return "RANK" in environ and "WORLD_SIZE" in environ


def read(environ: Mapping[str, str]) -> Placement:
    """The place torchrun gave; what a hand-set environment leaves out is filled in where only one answer fits."""
    rank = variables.needed(environ, "RANK", by="torchrun")
    world_size = variables.needed(environ, "WORLD_SIZE", by="torchrun", low=1)
    address, port = variables.main_address(environ), variables.main_port(environ)
    _require_master_address(environ, world_size, address, port)
    local_rank, local_world_size = _local(environ, rank, world_size, address)
    node_rank = variables.number(environ, "GROUP_RANK")
    num_nodes = variables.number(environ, "GROUP_WORLD_SIZE", low=1)
    launcher, who = _launcher(environ)
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
        num_nodes=-(-world_size // local_world_size) if num_nodes is None else num_nodes,
        launcher=launcher,
        reason=f"{variables.seen(environ, *_SHOWN)} are set, {who}",
        main_address=address,
        main_port=port,
        # torchrun counts restarts on each machine by itself; lockstep launch has all machines agree on a name.
        attempt=variables.text(environ, "LOCKSTEP_ATTEMPT")
        or str(variables.number(environ, "TORCHELASTIC_RESTART_COUNT") or 0),
        # The very text torch compares with: what torch's own env:// rendezvous does must agree with us.
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _launcher(environ: Mapping[str, str]) -> tuple[str, str]:
    if variables.text(environ, "LOCKSTEP_LAUNCH") is not None:
        return "lockstep launch", "as is LOCKSTEP_LAUNCH, by lockstep launch"
    if variables.text(environ, "TORCHELASTIC_RUN_ID") is not None:
        return "torchrun", "as is TORCHELASTIC_RUN_ID, by torchrun"
    return "torchrun", "as torchrun does, though not by torchrun itself (no TORCHELASTIC_RUN_ID)"


def _require_master_address(environ: Mapping[str, str], world_size: int, address: str | None, port: int | None) -> None:
    if world_size == 1:
        return
    missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value is None]
    if missing:
        raise TopologyError(
            f"{variables.seen(environ, 'RANK', 'WORLD_SIZE')} are set, so {world_size} processes have to meet, "
            f"but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. "
            f"Set MASTER_ADDR to the host of rank 0 (127.0.0.1 when all run on one machine) and MASTER_PORT to a free "
            f"port there, the same for every process; or start the script with `lockstep launch` or `torchrun`, "
            f"which set both."
        )


def _local(environ: Mapping[str, str], rank: int, world_size: int, address: str | None) -> tuple[int, int]:
    local_rank = variables.number(environ, "LOCAL_RANK")
    local_world_size = variables.number(environ, "LOCAL_WORLD_SIZE", low=1)
    if local_world_size is None and (
        world_size == 1 or variables.number(environ, "GROUP_WORLD_SIZE") == 1 or _is_loopback(address)
    ):
        # Processes that meet at a loopback address are all on this machine.
        local_world_size = world_size
    if local_rank is None and local_world_size == world_size:
        local_rank = rank
    elif local_rank is None and local_world_size == 1:
        local_rank = 0
    if local_rank is not None and local_world_size is not None:
        return local_rank, local_world_size

    missing = [
        name for name, value in (("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_world_size)) if value is None
    ]
    raise TopologyError(
        f"{variables.seen(environ, *_SHOWN, 'MASTER_ADDR')} are set, "
        f"but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not, "
        f"and the address may be another machine's, so there is no telling how the processes are spread over machines. "
        f"Set LOCAL_RANK to this process's number on its machine (from 0) and LOCAL_WORLD_SIZE to how many processes "
        f"of the job run there; or start the script with `lockstep launch` or `torchrun`, which set both."
    )


def _is_loopback(address: str | None) -> bool:
    if address is None:
        return False
    if address.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False
