"""A task started by srun. Merely sitting in an allocation (sbatch's script, salloc's shell) is not being a rank."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lockstep.config import hostlist, slurm
from lockstep.errors import TopologyError
from lockstep.topology.environments import variables
from lockstep.topology.environments.placement import Placement

# The step's own variables come first: those of the job describe the whole allocation, of which a step may use a part.
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_NODE_LIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


def detect(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as one task of a step."""
    if not slurm.in_task(environ):
        return False
    # mpiexec of MPICH and Intel MPI starts its helpers by srun, one per machine, and the helpers start the ranks: then
    # SLURM_PROCID is the helper's. srun may set PMI_RANK itself, but MPI_LOCALRANKID comes from such a helper only.
    return not {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"} <= environ.keys()


def read(environ: Mapping[str, str]) -> Placement:
    """The place srun gave."""
    rank = variables.needed(environ, "SLURM_PROCID", by="srun")
    tasks = variables.needed(environ, *_TASKS, by="srun", low=1)
    local_rank = variables.needed(environ, "SLURM_LOCALID", by="srun")
    node_rank = variables.needed(environ, "SLURM_NODEID", by="srun")
    nodes = variables.needed(environ, *_NODES, by="srun", low=1)
    job = variables.needed(environ, *slurm.JOB, by="srun")
    step = variables.needed(environ, *slurm.STEP, by="srun")
    port = variables.main_port(environ)
    return Placement(
        rank=rank,
        world_size=tasks,
        local_rank=local_rank,
        local_world_size=_local_world_size(environ, tasks, nodes, node_rank),
        node_rank=node_rank,
        num_nodes=nodes,
        launcher="slurm",
        reason=f"{_shown(environ)} are set, as srun does",
        main_address=_address(environ, rank, nodes, node_rank),
        main_port=variables.derived_port("slurm", str(job), str(step)) if port is None else port,
    )


def _shown(environ: Mapping[str, str]) -> str:
    """Only the variables that were used: of several names for one thing, the first that is set."""
    groups = (("SLURM_PROCID",), _TASKS, ("SLURM_LOCALID",), ("SLURM_NODEID",), _NODES, _TASKS_PER_NODE, slurm.STEP)
    used = [next((name for name in names if name in environ), names[0]) for names in groups]
    return variables.seen(environ, *used)


def _local_world_size(environ: Mapping[str, str], tasks: int, nodes: int, node_rank: int) -> int:
    name = next((name for name in _TASKS_PER_NODE if variables.text(environ, name) is not None), None)
    if name is None:
        if nodes == 1:
            return tasks
        raise TopologyError(
            f"{variables.seen(environ, *_TASKS, *_NODES)} are set, but neither of {' and '.join(_TASKS_PER_NODE)} is, "
            f"so there is no telling how many tasks share this machine. srun sets both; pass them on."
        )
    counts = tasks_per_node(environ[name], name=name)
    if len(counts) != nodes or sum(counts) != tasks:
        raise TopologyError(
            f"{name}={environ[name]} describes {sum(counts)} tasks on {len(counts)} machines, "
            f"but {_shown(environ)} say {tasks} tasks on {nodes}. "
            f"Some of these variables belong to another step or to the whole job; "
            f"start the script with srun directly, and do not set SLURM_* by hand."
        )
    if node_rank >= nodes:
        raise TopologyError(
            f"SLURM_NODEID is {node_rank}, but {_shown(environ)} describe machines 0 to {nodes - 1}. "
            f"Start the script with srun directly, and do not set SLURM_* by hand."
        )
    return counts[node_rank]


def _address(environ: Mapping[str, str], rank: int, nodes: int, node_rank: int) -> str:
    address = variables.main_address(environ)
    if address is not None:
        return address
    if rank == 0 and node_rank != 0:
        # Happens with --distribution=arbitrary; everybody else would knock at the first machine's door.
        raise TopologyError(
            f"SLURM_PROCID=0 runs on machine SLURM_NODEID={node_rank}, but the other tasks look for it on the first "
            f"machine of the step. Set MASTER_ADDR to the host of task 0 for all tasks, or use srun's default "
            f"--distribution."
        )
    if nodes == 1:
        return "127.0.0.1"
    hosts = variables.text(environ, *_NODE_LIST)
    if hosts is not None:
        return hostlist.expand(hosts)[0]
    raise TopologyError(
        f"The step runs on {nodes} machines, but none of {', '.join(_NODE_LIST)} is set, so the tasks do not know "
        f"where task 0 runs. Set MASTER_ADDR to its host for all tasks."
    )


def tasks_per_node(text: str, *, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """SLURM's short form of one count per machine, written out: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        count, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if count < 1 or times < 1:
            raise TopologyError(
                f"{name} is {hostlist.shortened(text)}, and {part.strip()!r} in it is not a number of tasks. Allowed: "
                f"numbers from 1, each perhaps with how often it repeats, such as 2(x3),1. "
                f"srun sets {name}; do not set it by hand."
            )
        if len(counts) + times > hostlist.MOST_HOSTS:
            raise TopologyError(
                f"{name} is {hostlist.shortened(text)}, which is more than {hostlist.MOST_HOSTS} machines. "
                f"srun sets {name}; do not set it by hand."
            )
        counts.extend([count] * times)
    return counts
