from __future__ import annotations

import pytest

from lockstep.errors import TopologyError
from lockstep.topology.environments import mpi

# As printed by rank 1 of `mpirun -n 2` of Open MPI 4.1.4. Note NODE_RANK=1 on the only machine.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_ess_base_jobid": "1656684545",
    "OMPI_MCA_orte_hnp_uri": "1656684544.0;tcp://192.0.2.2:49217",
    "OMPI_MCA_orte_num_nodes": "1",
    "PMIX_NAMESPACE": "1656684545",
    "PMIX_RANK": "1",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
# As printed by rank 1 of `mpiexec.hydra -n 2` of MPICH 4.0.2.
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}


def ompi(rank: int, size: int, local_rank: int, local_size: int, **more: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "MASTER_ADDR": "node1",
        **more,
    }


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (OPEN_MPI, "Open MPI"),
        (MVAPICH, "MVAPICH"),
        (HYDRA, "MPICH or Intel MPI"),
        (PALS, "MPICH or Intel MPI"),
    ],
)
def test_reads_each_family(environ: dict[str, str], name: str) -> None:
    assert mpi.detect(environ)
    place = mpi.read(environ)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (1, 2, 1, 2)
    assert (place.node_rank, place.num_nodes) == (0, 1)
    assert place.launcher == "mpi"
    assert place.reason.endswith(f"are set, as {name} does")
    assert next(iter(environ)) + "=1" in place.reason
    assert place.main_address == "127.0.0.1"


def test_only_the_named_families_go_before_slurm() -> None:
    assert mpi.detect_named(OPEN_MPI)
    assert mpi.detect_named(MVAPICH)
    assert not mpi.detect_named(HYDRA)


def test_mvapich_over_hydra_is_mvapich() -> None:
    assert mpi.read({**HYDRA, **MVAPICH}).reason.endswith("as MVAPICH does")


@pytest.mark.parametrize("environ", [{}, {"PMI_RANK": "0"}, {"OMPI_COMM_WORLD_SIZE": "2"}, {"PMIX_RANK": "0"}])
def test_half_a_family_is_none(environ: dict[str, str]) -> None:
    assert not mpi.detect(environ)


def test_one_process_needs_no_local_numbers() -> None:
    place = mpi.read({"PMI_RANK": "0", "PMI_SIZE": "1"})
    assert (place.world_size, place.local_world_size, place.launcher) == (1, 1, "mpi")


def test_several_processes_do() -> None:
    with pytest.raises(TopologyError, match="MPI_LOCALRANKID or PMI_LOCAL_RANK is not set"):
        mpi.read({"PMI_RANK": "0", "PMI_SIZE": "2"})


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (ompi(1, 4, 1, 2), "mpirun -x MASTER_ADDR=<host of rank 0>"),
        ({**MVAPICH, "MV2_COMM_WORLD_SIZE": "4"}, "mpirun_rsh ... MASTER_ADDR=<host of rank 0>"),
        ({**HYDRA, "PMI_SIZE": "4"}, "mpiexec -genv MASTER_ADDR <host of rank 0>"),
    ],
)
def test_several_machines_need_an_address(environ: dict[str, str], words: str) -> None:
    environ = {**environ, "MASTER_ADDR": ""}
    with pytest.raises(TopologyError) as caught:
        mpi.read(environ)
    assert "started 4 processes and only 2 of them on this machine, but MASTER_ADDR is not set" in str(caught.value)
    assert words in str(caught.value)


def test_address_and_port_that_are_set_win() -> None:
    place = mpi.read({**OPEN_MPI, "MASTER_ADDR": "node7", "MASTER_PORT": "1234"})
    assert (place.main_address, place.main_port) == ("node7", 1234)


@pytest.mark.parametrize("name", ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri", "PMI_JOBID"])
def test_the_port_comes_from_the_job(name: str) -> None:
    ports = [mpi.read({**HYDRA, "PMI_RANK": rank, name: job}).main_port for rank in "01" for job in ("job 1", "job 2")]
    assert all(port is not None and 20000 <= port <= 29999 for port in ports)
    assert ports[:2] == ports[2:]
    assert ports[0] != ports[1]


def test_the_port_when_nothing_names_the_job() -> None:
    assert mpi.read(HYDRA).main_port == 29500


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
@pytest.mark.parametrize("each", [1, 2, 3, 4])
@pytest.mark.parametrize("turns", [{}, {"OMPI_MCA_rmaps_base_mapping_policy": "node:SPAN"}])
def test_the_machine_follows_from_the_layout_that_was_asked_for(nodes: int, each: int, turns: dict[str, str]) -> None:
    for node in range(nodes):
        for local_rank in range(each):
            rank = local_rank * nodes + node if turns else node * each + local_rank
            place = mpi.read(ompi(rank, nodes * each, local_rank, each, **turns))
            assert (place.node_rank, place.num_nodes) == (node, nodes)


@pytest.mark.parametrize(
    "turns", [{"OMPI_MCA_rmaps_base_ranking_policy": "node"}, {"OMPI_MCA_rmaps_base_bynode": "1"}, {}]
)
def test_in_turn_by_other_words_or_because_nothing_else_fits(turns: dict[str, str]) -> None:
    assert mpi.read(ompi(2, 4, 1, 2, **turns)).node_rank == 0


def test_unequal_machines_agree_on_their_number() -> None:
    # As seen with `mpirun --host a:3,b:1 -n 4`.
    nodes = {"OMPI_MCA_orte_num_nodes": "2"}
    first = [mpi.read(ompi(rank, 4, rank, 3, **nodes)) for rank in range(3)]
    last = mpi.read(ompi(3, 4, 0, 1, **nodes))
    assert [place.node_rank for place in [*first, last]] == [0, 0, 0, 1]
    assert {place.num_nodes for place in [*first, last]} == {2}
    assert "a guess" in last.reason


def test_a_count_of_machines_that_cannot_be_is_not_believed() -> None:
    place = mpi.read(ompi(3, 4, 1, 2, OMPI_MCA_orte_num_nodes="9"))
    assert (place.node_rank, place.num_nodes) == (1, 2)


@pytest.mark.parametrize("name", [name for name in OPEN_MPI if "COMM_WORLD" in name and "NODE" not in name])
@pytest.mark.parametrize("value", ["-1", "one", ""])
def test_a_value_that_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(TopologyError, match=rf"{name} is '{value}'. Allowed: a whole number"):
        mpi.read({**OPEN_MPI, name: value})


def test_numbers_that_do_not_fit_are_named_with_what_was_seen() -> None:
    with pytest.raises(TopologyError, match=r"rank is 2, and must be from 0 to 1.*OMPI_COMM_WORLD_RANK=2"):
        mpi.read({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"})
