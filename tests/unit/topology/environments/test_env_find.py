from __future__ import annotations

import pytest

from lockstep.errors import TopologyError
from lockstep.topology.environments import ORDER, find

TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29400",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
SRUN = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_STEP_NODELIST": "vm",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "4"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "5", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "5"}


def test_the_order() -> None:
    assert [environment.name for environment in ORDER] == ["torchrun", "mpi", "slurm", "mpi by PMI", "single"]


@pytest.mark.parametrize(
    ("environ", "launcher", "world_size"),
    [
        ({}, "none", 1),
        (TORCHRUN, "torchrun", 2),
        ({**TORCHRUN, "LOCKSTEP_LAUNCH": "1"}, "lockstep launch", 2),
        ({**SRUN, **OPEN_MPI, **TORCHRUN}, "torchrun", 2),
        (OPEN_MPI, "mpi", 3),
        ({**SRUN, **OPEN_MPI}, "mpi", 3),
        (SRUN, "slurm", 4),
        ({**SRUN, **PMI}, "slurm", 4),
        ({**SRUN, "WORLD_SIZE": "4"}, "slurm", 4),
        (HYDRA, "mpi", 5),
        ({**SRUN, **HYDRA}, "mpi", 5),
        ({**SRUN, "SLURM_STEP_ID": "4294967291"}, "none", 1),
    ],
)
def test_who_is_believed(environ: dict[str, str], launcher: str, world_size: int) -> None:
    place = find(environ)
    assert (place.launcher, place.world_size) == (launcher, world_size)


def test_the_mapping_is_left_alone() -> None:
    environ = dict(TORCHRUN)
    find(environ)
    assert environ == TORCHRUN


def test_a_broken_environment_is_not_passed_over() -> None:
    with pytest.raises(TopologyError, match="RANK is 'x'"):
        find({**SRUN, **TORCHRUN, "RANK": "x"})
