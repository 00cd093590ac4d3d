"""Who am I: one frozen value that every package is handed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lockstep.config.choices import DistributedType
from lockstep.topology import devices, environments


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This process's place in the job."""

    rank: int = 0
    """Number of this process in the job."""
    world_size: int = 1
    """Processes in the job."""
    local_rank: int = 0
    """Number of this process on its machine."""
    local_world_size: int = 1
    """Processes on this machine."""
    node_rank: int = 0
    """Number of this machine."""
    num_nodes: int = 1
    """Machines in the job."""
    device: torch.device
    """Where this process computes."""
    device_reason: str = ""
    """Why there."""
    backend: str | None = None
    """What the processes talk over; None when nobody started this process as part of a job."""
    distributed_type: DistributedType = DistributedType.NO
    """The kind of job."""
    launcher: str = "none"
    """Who started this process."""
    reason: str = ""
    """How we know."""
    main_address: str | None = None
    """Host of rank 0's store."""
    main_port: int | None = None
    """Port of rank 0's store."""
    attempt: str = "0"
    """Which start of the job this is."""
    agent_store: bool = False
    """Whether the launcher hosts the store, so that it outlives the ranks."""

    @property
    def is_main(self) -> bool:
        """Whether this is the job's first process."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is its machine's first process."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the job's last process."""
        return self.rank == self.world_size - 1

    def __str__(self) -> str:
        place = f"rank {self.rank} of {self.world_size}" if self.world_size > 1 else "one process"
        over = f" over {self.backend}" if self.world_size > 1 else ""
        return f"{place}{over} on {self.device} ({self.reason}; {self.device_reason})"


def discover(
    environ: Mapping[str, str], *, cpu: bool = False, device: str | None = None, backend: str | None = None
) -> Topology:
    """Read this process's place from the environment it was started in."""
    place = environments.find(environ)
    choice = devices.choose_device(
        cpu=cpu, fixed=device, local_rank=place.local_rank, local_world_size=place.local_world_size
    )
    launched = place.launcher != "none"
    over = devices.backend_for(choice.device, backend)
    return Topology(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
        num_nodes=place.num_nodes,
        device=choice.device,
        device_reason=choice.reason,
        backend=over if launched else None,
        distributed_type=devices.distributed_type(choice.device, place.world_size),
        launcher=place.launcher,
        reason=place.reason,
        main_address=place.main_address,
        main_port=place.main_port,
        attempt=place.attempt,
        agent_store=place.agent_store,
    )
