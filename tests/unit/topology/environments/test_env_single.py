from __future__ import annotations

import pytest

from lockstep.errors import TopologyError
from lockstep.topology.environments import single


def test_alone() -> None:
    assert single.detect({})
    place = single.read({"HOME": "/root"})
    assert (place.rank, place.world_size, place.launcher) == (0, 1, "none")
    assert place.reason == "no launcher's variables are set"
    assert place.main_address is None
    assert place.main_port is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is, but without RANK it is not used"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "SLURM allocation, but srun did not start this process"),
    ],
)
def test_says_when_more_may_have_been_meant(environ: dict[str, str], words: str) -> None:
    place = single.read(environ)
    assert place.world_size == 1
    assert words in place.reason


def test_a_rank_above_0_is_not_alone() -> None:
    with pytest.raises(TopologyError, match=r"RANK=1 is set and WORLD_SIZE is not.*Set WORLD_SIZE too, or unset RANK"):
        single.read({"RANK": "1"})


@pytest.mark.parametrize("rank", ["0", "00", "", "captain"])
def test_a_rank_that_says_nothing(rank: str) -> None:
    assert single.read({"RANK": rank}).world_size == 1
