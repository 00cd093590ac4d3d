from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import TopologyError
from lockstep.topology.environments import slurm

# The names as printed by a task of `srun` of SLURM 22.05; a job of 5 tasks on 3 machines, and a step on 2 of them.
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in STEP.items() if name not in names}


def test_reads_the_step_not_the_job() -> None:
    assert slurm.detect(STEP)
    place = slurm.read(STEP)
    assert (place.rank, place.world_size) == (2, 3)
    assert (place.local_rank, place.local_world_size) == (0, 1)
    assert (place.node_rank, place.num_nodes) == (1, 2)
    assert place.main_address == "gpu08"
    assert place.launcher == "slurm"
    assert "SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=3" in place.reason
    assert "SLURM_NTASKS" not in place.reason
    assert place.reason.endswith("as srun does")


def test_each_machine_has_its_own_count() -> None:
    place = slurm.read({**STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})
    assert place.local_world_size == 2


def test_old_srun_without_step_variables() -> None:
    names = [name for name in STEP if name.startswith("SLURM_STEP_") and name != "SLURM_STEP_ID"]
    place = slurm.read(without(*names))
    assert (place.world_size, place.num_nodes, place.local_world_size, place.main_address) == (5, 3, 2, "gpu07")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        without("SLURM_STEP_ID"),
        without("SLURM_PROCID"),
        {**STEP, "SLURM_STEP_ID": ""},
        *({**STEP, "SLURM_STEP_ID": str(special)} for special in range(4294967290, 4294967296)),
        *({**STEP, "SLURM_STEP_ID": word} for word in ("batch", "extern", "interactive")),
    ],
)
def test_an_allocation_alone_is_not_a_rank(environ: dict[str, str]) -> None:
    assert not slurm.detect(environ)


def test_srun_may_set_pmi_too() -> None:
    assert slurm.detect({**STEP, "PMI_RANK": "2", "PMI_SIZE": "3", "PMI_JOBID": "77.1"})


def test_a_helper_of_mpiexec_started_by_srun_is_not_the_rank() -> None:
    # As printed under `mpiexec.hydra -n 2` in an sbatch script: one task for srun, two processes for mpiexec.
    assert not slurm.detect({**STEP, "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})


def test_address_and_port_that_are_set_win() -> None:
    place = slurm.read({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "SLURM_STEP_NODELIST": "[["})
    assert (place.main_address, place.main_port) == ("10.0.0.1", 1234)


def test_the_port_comes_from_job_and_step() -> None:
    def port(job: str, step: str, rank: str = "2") -> int:
        found = slurm.read({**STEP, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_PROCID": rank}).main_port
        assert found is not None
        assert 20000 <= found <= 29999
        return found

    assert port("77", "1") == port("77", "1", rank="1")
    assert len({port("77", "0"), port("77", "1"), port("78", "0")}) == 3


def test_without_a_host_list() -> None:
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    with pytest.raises(TopologyError, match=r"runs on 2 machines, but none of SLURM_STEP_NODELIST.*Set MASTER_ADDR"):
        slurm.read(without(*lists))
    one = {**without(*lists), "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0"}
    assert slurm.read(one).main_address == "127.0.0.1"


def test_without_tasks_per_node() -> None:
    counts = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    with pytest.raises(TopologyError, match="no telling how many tasks share this machine"):
        slurm.read(without(*counts))
    assert slurm.read({**without(*counts), "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}).local_world_size == 3


def test_counts_of_another_step_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"SLURM_TASKS_PER_NODE=2\(x2\),1 describes 5 tasks on 3 machines"):
        slurm.read(without("SLURM_STEP_TASKS_PER_NODE"))


def test_a_machine_outside_the_step_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"SLURM_NODEID is 2, but .* describe machines 0 to 1"):
        slurm.read({**STEP, "SLURM_NODEID": "2"})


def test_task_0_away_from_the_first_machine_needs_an_address() -> None:
    away = {**STEP, "SLURM_PROCID": "0"}
    with pytest.raises(TopologyError, match=r"SLURM_PROCID=0 runs on machine SLURM_NODEID=1.*Set MASTER_ADDR"):
        slurm.read(away)
    assert slurm.read({**away, "MASTER_ADDR": "gpu09"}).main_address == "gpu09"


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_STEP_NUM_NODES",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
    ],
)
@pytest.mark.parametrize("value", ["-1", "one"])
def test_a_value_that_is_no_number_is_named(name: str, value: str) -> None:
    environ = {**STEP, name: value}
    assert slurm.detect(environ)
    with pytest.raises(TopologyError, match=rf"{name} is '{value}'. Allowed: a whole number"):
        slurm.read(environ)


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID"])
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(TopologyError, match=rf"{name}.* is not set, although other variables of srun are"):
        slurm.read(without(name))


@pytest.mark.parametrize("text", ["", ",", "2,", "0", "2(x0)", "2(3)", "2x3", "(x3)", "-1", "2(x3", "two", "2(x-1)"])
def test_bad_tasks_per_node_is_named(text: str) -> None:
    with pytest.raises(TopologyError) as caught:
        slurm.tasks_per_node(text, name="SLURM_STEP_TASKS_PER_NODE")
    assert f"SLURM_STEP_TASKS_PER_NODE is {text!r}" in str(caught.value)


@pytest.mark.parametrize("text", ["1(x999999999)", ",".join(["1(x60000)"] * 2)])
def test_tasks_per_node_is_bounded(text: str) -> None:
    with pytest.raises(TopologyError, match="more than 65536 machines"):
        slurm.tasks_per_node(text)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.data())
def test_tasks_per_node_is_the_inverse_of_the_short_form(counts: list[int], data: st.DataObject) -> None:
    parts = []
    for count, group in itertools.groupby(counts):
        times = len(list(group))
        if times == 1:
            parts.append(data.draw(st.sampled_from([f"{count}", f"{count}(x1)"])))
        else:
            parts.append(f"{count}(x{times})")
    assert slurm.tasks_per_node(",".join(parts)) == counts


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_every_task_of_a_block_layout_finds_its_place(counts: list[int]) -> None:
    text = ",".join(map(str, counts))
    rank = 0
    for node, count in enumerate(counts):
        for local_rank in range(count):
            place = slurm.read(
                {
                    **STEP,
                    "SLURM_PROCID": str(rank),
                    "SLURM_LOCALID": str(local_rank),
                    "SLURM_NODEID": str(node),
                    "SLURM_STEP_NUM_TASKS": str(sum(counts)),
                    "SLURM_STEP_NUM_NODES": str(len(counts)),
                    "SLURM_STEP_TASKS_PER_NODE": text,
                }
            )
            assert (place.rank, place.local_world_size, place.node_rank) == (rank, count, node)
            rank += 1
