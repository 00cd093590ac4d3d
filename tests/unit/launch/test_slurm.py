from __future__ import annotations

import socket

import pytest

from lockstep.errors import ConfigError, TopologyError
from lockstep.launch import slurm

# As printed by SLURM 22.05 in a job of two nodes: by sbatch's script, by salloc's shell, and by a task of srun.
BATCH = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "node0",
}
SHELL = {
    name: value
    for name, value in BATCH.items()
    if name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_TASKS_PER_NODE")
}
TASK = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURMD_NODENAME": "node1",
}


def found(environ: dict[str, str]) -> slurm.Allocation:
    allocation = slurm.allocation(environ)
    assert allocation is not None
    return allocation


def test_outside_of_slurm() -> None:
    assert slurm.allocation({}) is None
    assert slurm.allocation({"SLURM_CONF": "/etc/slurm.conf"}) is None


def test_a_batch_script() -> None:
    allocation = found(BATCH)
    assert (allocation.job_id, allocation.hosts, allocation.num_nodes) == ("3", ("node0", "node1"), 2)
    assert not allocation.agent
    assert allocation.node_rank is None
    assert allocation.here == "node0"
    assert allocation.needs_srun


def test_one_node_needs_no_srun_unless_the_shell_is_elsewhere() -> None:
    one = {"SLURM_JOB_NODELIST": "node0", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1"}
    assert not found({**BATCH, **one}).needs_srun
    login = found({**SHELL, **one})
    assert login.here is None
    assert login.needs_srun


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "interactive"])
def test_an_interactive_step_is_an_allocation(step: str) -> None:
    assert not found({**BATCH, "SLURM_STEP_ID": step}).agent


def test_an_agent_knows_its_number() -> None:
    for environ in (TASK, {**TASK, slurm.AGENT: "1"}):
        agent = found(environ)
        assert (agent.agent, agent.node_rank, agent.num_nodes, agent.needs_srun) == (True, 1, 2, False)


def test_the_step_counts_for_an_agent_not_the_job() -> None:
    part = {"SLURM_JOB_NODELIST": "node[0-3]", "SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "4"}
    assert found({**TASK, **part}).hosts == ("node0", "node1")


def test_a_lone_task_is_no_agent_unless_we_started_it() -> None:
    alone = {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node1"}
    assert slurm.allocation(alone) is None
    agent = found({**alone, slurm.AGENT: "1", "SLURM_NODEID": "0"})
    assert (agent.agent, agent.node_rank, agent.hosts) == (True, 0, ("node1",))


def test_several_launchers_on_a_node_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"started `lockstep launch` 4 times on 2 nodes.*--ntasks-per-node=1"):
        slurm.allocation({**TASK, "SLURM_STEP_NUM_TASKS": "4"})


def test_an_allocation_that_contradicts_itself() -> None:
    with pytest.raises(ConfigError, match=r"names 2 nodes \(node\[0-1\]\) and counts 3"):
        slurm.allocation({**BATCH, "SLURM_JOB_NUM_NODES": "3"})
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST, SLURM_NODELIST is set"):
        slurm.allocation({"SLURM_JOB_ID": "3"})
    with pytest.raises(ConfigError, match="SLURM_JOB_NUM_NODES='two' is not a whole number"):
        slurm.allocation({**BATCH, "SLURM_JOB_NUM_NODES": "two"})
    with pytest.raises(TopologyError, match="host list"):
        slurm.allocation({**BATCH, "SLURM_JOB_NODELIST": "node["})


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "a100:4,h100:2"}, 6),
        ({"SLURM_GPUS_PER_NODE": "many"}, None),
    ],
)
def test_gpus_are_counted_where_slurm_does(variables: dict[str, str], gpus: int | None) -> None:
    assert found({**BATCH, **variables}).gpus_per_node == gpus


def test_agents_work_out_the_same_port() -> None:
    other = {**TASK, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURMD_NODENAME": "node0"}
    ports = {slurm.rendezvous_port(found(environ)) for environ in (TASK, other)}
    assert len(ports) == 1
    assert slurm.rendezvous_port(found({**TASK, "SLURM_STEP_ID": "1"})) not in ports
    assert slurm.rendezvous_port(found({**TASK, "SLURM_JOB_ID": "4"})) not in ports


def test_a_port_in_use_is_passed_over_where_that_can_be_seen() -> None:
    port = slurm.rendezvous_port(found(BATCH))
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        again = slurm.rendezvous_port(found(BATCH))
        assert again != port
        assert 20000 <= again < 30000


AGAIN = ["/bin/python", "-m", "lockstep", "launch", "--cpu", "--num_machines", "2", "train.py", "launch"]


def test_srun_starts_one_agent_on_each_node() -> None:
    argv = slurm.srun_command(found(BATCH), num_processes_per_node=3, port=1234, argv_of_lockstep_launch=AGAIN)
    at = argv.index("srun")
    assert argv[:at] == [
        *("env", "-u", "SLURM_CPUS_PER_TASK", "-u", "SLURM_NTASKS", "-u", "SLURM_NPROCS", "-u", "SLURM_NTASKS_PER_NODE")
    ]
    assert argv[at:] == [
        *("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1"),
        "--export=ALL,LOCKSTEP_SLURM_AGENT=1",
        *("/bin/python", "-m", "lockstep", "launch", "--num_processes", "6", "--main_process_port", "1234"),
        *("--cpu", "--num_machines", "2", "train.py", "launch"),
    ]


def test_fewer_machines_than_nodes() -> None:
    command = {"num_processes_per_node": 1, "port": 1, "argv_of_lockstep_launch": AGAIN}
    argv = slurm.srun_command(found(SHELL), num_nodes=1, **command)  # type: ignore[arg-type]
    assert argv[:4] == ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
    assert "--nodelist=node0" in argv
    with pytest.raises(ConfigError, match=r"num_machines is 3, but SLURM's job 3 has 2 nodes \(node0, node1\)"):
        slurm.srun_command(found(SHELL), num_nodes=3, **command)  # type: ignore[arg-type]
