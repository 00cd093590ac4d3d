"""A process started by mpirun or mpiexec. MPI itself is not used: it only tells each process its number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import TopologyError
from lockstep.topology.environments import variables
from lockstep.topology.environments.placement import Placement


@dataclass(frozen=True, kw_only=True)
class _Family:
    """One way of telling a process its number."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    pass_address: str

    def started(self, environ: Mapping[str, str]) -> bool:
        return self.rank in environ and self.size in environ


_NAMED = (
    _Family(
        name="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        pass_address="mpirun -x MASTER_ADDR=<host of rank 0> ...",
    ),
    _Family(
        name="MVAPICH",
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        pass_address="mpirun_rsh ... MASTER_ADDR=<host of rank 0> <command>, or mpiexec -genv MASTER_ADDR <host>",
    ),
)
_PMI = _Family(
    name="MPICH or Intel MPI",
    rank="PMI_RANK",
    size="PMI_SIZE",
    # The second names are those of Cray's PALS.
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    pass_address="mpiexec -genv MASTER_ADDR <host of rank 0> ...",
)

# Each is set by the launcher itself, alike for all processes of one mpirun and differently for the next. Ids of batch
# systems (PBS_JOBID and the like) are left out on purpose: not every mpirun carries them to the other machines, and
# processes that derive different ports wait for each other in vain.
_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri", "PMI_JOBID")
_LAST_RESORT_PORT = 29500


def detect_named(environ: Mapping[str, str]) -> bool:
    """Whether Open MPI or MVAPICH started this process: their variables are set by nobody else."""
    return any(family.started(environ) for family in _NAMED)


def detect(environ: Mapping[str, str]) -> bool:
    """Whether any MPI started this process; ask SLURM before believing PMI_*, because srun can set those too."""
    return detect_named(environ) or _PMI.started(environ)


def read(environ: Mapping[str, str]) -> Placement:
    """The place mpirun gave."""
    family = next((family for family in _NAMED if family.started(environ)), _PMI)
    rank = variables.needed(environ, family.rank, by=family.name)
    size = variables.needed(environ, family.size, by=family.name, low=1)
    if size == 1:
        local_rank, local_size = 0, 1
    else:
        local_rank = variables.needed(environ, *family.local_rank, by=family.name)
        local_size = variables.needed(environ, *family.local_size, by=family.name, low=1)
    node_rank, num_nodes, doubt = _node(environ, rank, size, local_rank, local_size)
    shown = variables.seen(environ, family.rank, family.size, *family.local_rank, *family.local_size)
    return Placement(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        launcher="mpi",
        reason=f"{shown} are set, as {family.name} does{doubt}",
        main_address=_address(environ, family, shown, size, local_size),
        main_port=_port(environ),
    )


def _node(environ: Mapping[str, str], rank: int, size: int, local_rank: int, local_size: int) -> tuple[int, int, str]:
    """This machine's number, how many there are, and what to say when the number is a guess.

    No MPI tells a process its machine's number. OMPI_COMM_WORLD_NODE_RANK sounds like it and is not: it counts the
    processes on one machine, over all jobs. So it follows from the ranks, which mpirun lays out machine by machine
    (the default) or in turn (``--map-by node``).
    """
    if local_size >= size:
        return 0, 1, ""
    num_nodes = -(-size // local_size)
    value = variables.number(environ, "OMPI_MCA_orte_num_nodes")
    # Preferred where it can be true (a process for each machine): when the machines have unequal numbers of processes,
    # the division above gives each machine another answer.
    if value is not None and 2 <= value <= size - local_size + 1:
        num_nodes = value
    in_turn = rank - local_rank * num_nodes
    by_machine, rest = divmod(rank - local_rank, local_size)
    if rest != 0:
        by_machine = -1
    # A rank may fit both layouts, with different numbers. Then the one that was asked for is right.
    candidates = (in_turn, by_machine) if _maps_by_node(environ) else (by_machine, in_turn)
    for node_rank in candidates:
        if 0 <= node_rank < num_nodes:
            return node_rank, num_nodes, ""
    guess = min(rank // local_size, num_nodes - 1)
    return guess, num_nodes, " (the machines have unequal numbers of processes, so the machine's number is a guess)"


def _maps_by_node(environ: Mapping[str, str]) -> bool:
    """Whether Open MPI was told ``--map-by node``, ``--rank-by node`` or the old ``--bynode``."""
    asked = ("OMPI_MCA_rmaps_base_mapping_policy", "OMPI_MCA_rmaps_base_ranking_policy")
    return (
        any(environ.get(name, "").partition(":")[0] == "node" for name in asked)
        or environ.get("OMPI_MCA_rmaps_base_bynode") == "1"
    )


def _address(environ: Mapping[str, str], family: _Family, shown: str, size: int, local_size: int) -> str:
    address = variables.main_address(environ)
    if address is not None:
        return address
    if local_size >= size:
        return "127.0.0.1"
    raise TopologyError(
        f"{shown} are set, so {family.name} started {size} processes and only {local_size} of them on this machine, "
        f"but MASTER_ADDR is not set, and mpirun does not tell the others where rank 0 runs. "
        f"Pass it on to all of them: {family.pass_address}"
    )


def _port(environ: Mapping[str, str]) -> int:
    port = variables.main_port(environ)
    if port is not None:
        return port
    job = variables.text(environ, *_JOB_NAMES)
    return _LAST_RESORT_PORT if job is None else variables.derived_port("mpi", job)
