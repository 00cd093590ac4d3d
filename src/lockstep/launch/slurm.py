"""Inside SLURM: what was allocated, and the srun that starts one agent on each of its nodes.

An agent starts the ranks of its node, so srun starts one task per node however many ranks there are.
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.config import env, hostlist, slurm
from lockstep.errors import ConfigError

AGENT = "LOCKSTEP_SLURM_AGENT"
"""Set for the agents that Lockstep itself starts by srun."""

# The step's own variables come first: an agent's step may use a part of the allocation.
_HOSTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_STEP_HOSTS = ("SLURM_STEP_NODELIST", *_HOSTS)
_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
_STEP_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_STEP_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_GPUS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")

# sbatch leaves these for srun to read as if they were its options. They were meant for one rank; an agent that is the
# only task of its node has to get what all ranks of the node got.
_PER_TASK = (
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND"),
)

# Below the ports Linux gives to outgoing connections, so that a passing connection does not occupy one.
_FIRST_PORT, _PORTS = 20000, 10000


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes that a job, or the step that an agent belongs to, may use."""

    job_id: str
    hosts: tuple[str, ...]
    agent: bool = False
    """Whether this process is one of several that srun started, one per node."""
    node_rank: int | None = None
    """This node's number, for an agent."""
    here: str | None = None
    """The node this process runs on; None outside of them, as on a login node."""
    gpus_per_node: int | None = None
    """GPUs on this node, where SLURM counts them."""
    step_id: str = ""
    """The step's number, for an agent."""
    inherited: tuple[str, ...] = ()
    """Variables that srun would take for its options, and is not to see."""

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return len(self.hosts)

    @property
    def needs_srun(self) -> bool:
        """Whether the ranks run elsewhere: on other nodes too, or only there (salloc's shell on a login node)."""
        return not self.agent and (self.num_nodes > 1 or self.here not in self.hosts)


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """What SLURM gave this process to start ranks on; None where it only ran the command, or is not there at all."""
    job = _text(environ, slurm.JOB)
    if job is None:
        return None
    if slurm.in_task(environ):
        return _step(environ, job)
    return Allocation(
        job_id=job,
        hosts=_hosts(environ, _HOSTS, _NODES),
        here=_text(environ, ("SLURMD_NODENAME",)),
        gpus_per_node=_gpus(environ),
        inherited=tuple(name for name in _PER_TASK if name in environ),
    )


def _step(environ: Mapping[str, str], job: str) -> Allocation | None:
    """Of a process that srun started: an agent if it was started once per node, on more than one."""
    nodes, tasks = _number(environ, _STEP_NODES), _number(environ, _STEP_TASKS)
    if nodes is None or tasks is None or (tasks == 1 and AGENT not in environ):
        return None
    if tasks != nodes:
        raise ConfigError(
            f"srun started `lockstep launch` {tasks} times on {nodes} nodes, and each would start a job of its own. "
            f"Start it once on each node (srun --ntasks-per-node=1 lockstep launch ...), leave srun out (it is started "
            f"on all nodes of the job by itself), or start the ranks by srun: srun python script.py."
        )
    if nodes == 1 and AGENT not in environ:
        return None
    return Allocation(
        job_id=job,
        hosts=_hosts(environ, _STEP_HOSTS, _STEP_NODES),
        agent=True,
        node_rank=_number(environ, ("SLURM_NODEID",)),
        here=_text(environ, ("SLURMD_NODENAME",)),
        gpus_per_node=_gpus(environ),
        step_id=_text(environ, slurm.STEP) or "",
    )


def rendezvous_port(allocation: Allocation) -> int:
    """The port where the agents of a job meet.

    It follows from the numbers of job and step, so that agents which nobody told can each work it out; where this is
    the node that will listen, ports in use are passed over.
    """
    digest = hashlib.sha256(f"slurm\0{allocation.job_id}\0{allocation.step_id}".encode()).digest()
    start = int.from_bytes(digest[:8], "big") % _PORTS
    if allocation.agent or allocation.here != allocation.hosts[0]:
        return _FIRST_PORT + start
    ports = (_FIRST_PORT + (start + further) % _PORTS for further in range(_PORTS))
    return next(filter(_is_free, ports), _FIRST_PORT + start)


def srun_command(
    allocation: Allocation,
    *,
    num_processes_per_node: int,
    port: int,
    argv_of_lockstep_launch: Sequence[str],
    num_nodes: int | None = None,
) -> list[str]:
    """The srun that runs ``lockstep launch`` once on each node, as an agent that knows its number.

    ``argv_of_lockstep_launch`` is the whole command, from an absolute path on, with the number of machines and the
    main one's address; how many processes there are and where the agents meet is put in here.
    """
    nodes = allocation.num_nodes if num_nodes is None else num_nodes
    if not 1 <= nodes <= allocation.num_nodes:
        raise ConfigError(
            f"num_machines is {nodes}, but SLURM's job {allocation.job_id} has {allocation.num_nodes} nodes "
            f"({', '.join(allocation.hosts[:8])}). Ask sbatch or salloc for as many as you want to use."
        )
    # Ours come first, so that what was typed wins where it says the same again. Told the number, the agents need not
    # each count devices, and cannot count differently.
    at = list(argv_of_lockstep_launch).index("launch") + 1
    told = ["--num_processes", str(nodes * num_processes_per_node), "--main_process_port", str(port)]
    hidden = [part for name in allocation.inherited for part in ("-u", name)]
    return [
        *(["env", *hidden] if hidden else []),
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        # The agent must be free to use every core of the node, and to let its ranks use them.
        "--cpu-bind=none",
        # One node's failure ends the others, which would wait for it.
        "--kill-on-bad-exit=1",
        f"--export=ALL,{AGENT}=1",
        *(["--nodelist=" + ",".join(allocation.hosts[:nodes])] if nodes < allocation.num_nodes else []),
        *argv_of_lockstep_launch[:at],
        *told,
        *argv_of_lockstep_launch[at:],
    ]


def _text(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((value for name in names if (value := environ.get(name, "").strip())), None)


def _number(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((env.parse_int(environ[name], name) for name in names if environ.get(name, "").strip()), None)


def _hosts(environ: Mapping[str, str], lists: Sequence[str], counts: Sequence[str]) -> tuple[str, ...]:
    text = _text(environ, lists)
    if text is None:
        raise ConfigError(
            f"This is a job of SLURM, but none of {', '.join(lists)} is set, so its nodes are not known. SLURM sets "
            f"them; pass them on, or unset SLURM_JOB_ID to start processes on this machine only."
        )
    hosts = tuple(hostlist.expand(text))
    count = _number(environ, counts)
    if count is not None and count != len(hosts):
        raise ConfigError(
            f"SLURM names {len(hosts)} nodes ({text}) and counts {count}. Some of its variables belong to another job; "
            f"do not set SLURM_* by hand."
        )
    return hosts


def _gpus(environ: Mapping[str, str]) -> int | None:
    """``4``, ``a100:4`` or ``a100:4,h100:2`` as a number."""
    text = _text(environ, _GPUS)
    if text is None:
        return None
    counts = [re.fullmatch(r"(?:.*:)?([0-9]{1,6})", part.strip()) for part in text.split(",")]
    return sum(int(count[1]) for count in counts if count) if all(counts) else None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
