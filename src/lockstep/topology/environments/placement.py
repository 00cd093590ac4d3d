"""What the environment says about this process's place in the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.errors import TopologyError

LAUNCHERS = ("none", "torchrun", "lockstep launch", "slurm", "mpi")
"""Everybody who can have started this process."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One process's place, as its launcher told it; checked, so that a half-set environment fails here."""

    rank: int = 0
    """Number of this process in the job."""
    world_size: int = 1
    """Processes in the job."""
    local_rank: int = 0
    """Number of this process on its machine."""
    local_world_size: int = 1
    """Processes of the job on this machine."""
    node_rank: int = 0
    """Number of this machine."""
    num_nodes: int = 1
    """Machines in the job."""
    launcher: str
    """Who started this process: one of `LAUNCHERS`."""
    reason: str
    """Which variables told us so, in plain words."""
    main_address: str | None = None
    """Host of rank 0's store; None when the process is alone and nobody named one."""
    main_port: int | None = None
    """Port of rank 0's store; None like the address."""
    attempt: str = "0"
    """Which start of the job this is, by a name that all its processes know."""
    agent_store: bool = False
    """Whether an elastic agent already hosts the store, so that rank 0 must not open one."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise TopologyError(
                f"This process cannot take its place in the job: {'; '.join(problems)}. "
                f"It was read from the environment like this: {self.reason}. "
                f"Correct these variables where the process is started, or unset them all to run one process."
            )

    def _problems(self) -> Iterator[str]:
        if self.launcher not in LAUNCHERS:
            yield f"launcher is {self.launcher!r}, and must be one of {', '.join(map(repr, LAUNCHERS))}"
        for index, of_name, of in (
            ("rank", "world_size", self.world_size),
            ("local_rank", "local_world_size", self.local_world_size),
            ("node_rank", "num_nodes", self.num_nodes),
        ):
            value: int = getattr(self, index)
            if of < 1:
                yield f"{of_name} is {of}, and must be at least 1"
            elif not 0 <= value < of:
                yield f"{index} is {value}, and must be from 0 to {of - 1} because {of_name} is {of}"
        yield from self._problems_with_nodes()
        if self.main_port is not None and not 0 < self.main_port < 65536:
            yield f"main_port is {self.main_port}, and must be from 1 to 65535"

    def _problems_with_nodes(self) -> Iterator[str]:
        if self.local_world_size > self.world_size:
            yield (
                f"local_world_size is {self.local_world_size}, and cannot be more than "
                f"world_size, which is {self.world_size}"
            )
        elif self.num_nodes == 1 and self.local_world_size != self.world_size:
            yield (
                f"local_world_size is {self.local_world_size} and world_size is {self.world_size}, "
                f"and on one machine (num_nodes is 1) they must be equal"
            )
        elif self.num_nodes > 1 and self.local_world_size + self.num_nodes - 1 > self.world_size:
            yield (
                f"{self.local_world_size} of {self.world_size} processes run on this machine, "
                f"which leaves too few for the other {self.num_nodes - 1} (num_nodes is {self.num_nodes})"
            )
