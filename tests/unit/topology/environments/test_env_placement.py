from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lockstep.errors import TopologyError
from lockstep.topology.environments import Placement


def place(**fields: Any) -> Placement:
    return Placement(**{"launcher": "torchrun", "reason": "RANK=x is set", **fields})


def test_one_process_is_the_default() -> None:
    alone = place()
    assert (alone.rank, alone.world_size, alone.local_rank, alone.local_world_size) == (0, 1, 0, 1)
    assert (alone.node_rank, alone.num_nodes, alone.attempt, alone.agent_store) == (0, 1, "0", False)
    assert alone.main_address is None
    assert alone.main_port is None


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        place().rank = 1  # type: ignore[misc]


def test_unequal_machines_are_fine() -> None:
    place(rank=3, world_size=4, local_world_size=1, node_rank=1, num_nodes=2)
    place(rank=0, world_size=4, local_world_size=3, node_rank=0, num_nodes=2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank": 1}, "rank is 1, and must be from 0 to 0 because world_size is 1"),
        ({"rank": -1}, "rank is -1"),
        ({"world_size": 0}, "world_size is 0, and must be at least 1"),
        ({"world_size": 2, "local_rank": 2, "local_world_size": 2}, "local_rank is 2, and must be from 0 to 1"),
        ({"world_size": 2, "local_world_size": 3}, "local_world_size is 3, and cannot be more than world_size"),
        ({"world_size": 2, "num_nodes": 2, "node_rank": 2}, "node_rank is 2, and must be from 0 to 1"),
        ({"world_size": 4, "local_world_size": 2}, "on one machine"),
        ({"world_size": 4, "local_world_size": 4, "num_nodes": 2}, "leaves too few for the other 1"),
        ({"main_port": 0}, "main_port is 0"),
        ({"main_port": 65536}, "main_port is 65536"),
        ({"launcher": "horovod"}, "launcher is 'horovod', and must be one of 'none', 'torchrun'"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(TopologyError) as caught:
        place(**fields)
    assert words in str(caught.value)
    assert "RANK=x is set" in str(caught.value)


def test_all_problems_at_once() -> None:
    with pytest.raises(TopologyError, match=r"rank is 5.*local_rank is 7.*main_port is 0"):
        place(rank=5, world_size=2, local_rank=7, local_world_size=2, main_port=0)
