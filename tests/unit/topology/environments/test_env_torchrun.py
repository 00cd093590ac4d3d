from __future__ import annotations

import pytest

from lockstep.errors import TopologyError
from lockstep.topology.environments import torchrun

# The names and numbers as printed by rank 3 of `torchrun --nnodes 2 --nproc-per-node 2`; address and restarts made up.
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_reads_what_torchrun_sets() -> None:
    assert torchrun.detect(TORCHRUN)
    place = torchrun.read(TORCHRUN)
    assert (place.rank, place.world_size) == (3, 4)
    assert (place.local_rank, place.local_world_size) == (1, 2)
    assert (place.node_rank, place.num_nodes) == (1, 2)
    assert (place.main_address, place.main_port) == ("node1", 29400)
    assert place.attempt == "2"
    assert place.agent_store
    assert place.launcher == "torchrun"
    assert "RANK=3, WORLD_SIZE=4" in place.reason
    assert place.reason.endswith("by torchrun")


def test_lockstep_launch_is_told_by_its_mark() -> None:
    place = torchrun.read({**TORCHRUN, "LOCKSTEP_LAUNCH": "1"})
    assert place.launcher == "lockstep launch"
    assert "LOCKSTEP_LAUNCH" in place.reason


@pytest.mark.parametrize("value", ["False", "true", "1", ""])
def test_only_the_text_torch_knows_means_agent_store(value: str) -> None:
    assert not torchrun.read({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": value}).agent_store


@pytest.mark.parametrize("environ", [{}, {"RANK": "0"}, {"WORLD_SIZE": "2"}, {"LOCAL_RANK": "0", "MASTER_ADDR": "x"}])
def test_detects_both_or_nothing(environ: dict[str, str]) -> None:
    assert not torchrun.detect(environ)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost", "LOCALHOST", "::1", "[::1]"])
def test_by_hand_on_one_host(address: str) -> None:
    place = torchrun.read({**BY_HAND, "MASTER_ADDR": address})
    assert (place.rank, place.local_rank, place.world_size, place.local_world_size) == (1, 1, 2, 2)
    assert (place.node_rank, place.num_nodes) == (0, 1)
    assert place.launcher == "torchrun"
    assert "not by torchrun itself" in place.reason
    assert not place.agent_store


def test_local_rank_alone_is_enough_on_one_host() -> None:
    place = torchrun.read({**BY_HAND, "LOCAL_RANK": "0"})
    assert (place.local_rank, place.local_world_size) == (0, 2)


def test_one_process_needs_no_address() -> None:
    place = torchrun.read({"RANK": "0", "WORLD_SIZE": "1"})
    assert (place.local_rank, place.local_world_size, place.num_nodes) == (0, 1, 1)
    assert (place.main_address, place.main_port) == (None, None)
    assert place.launcher == "torchrun"


def test_by_hand_on_several_hosts_asks_for_the_local_rank() -> None:
    with pytest.raises(TopologyError) as caught:
        torchrun.read({**BY_HAND, "MASTER_ADDR": "node1"})
    message = str(caught.value)
    assert "RANK=1, WORLD_SIZE=2 and MASTER_ADDR=node1 are set, but LOCAL_RANK and LOCAL_WORLD_SIZE are not" in message
    assert "Set LOCAL_RANK to this process's number on its machine" in message


def test_by_hand_on_several_hosts_asks_for_the_local_world_size() -> None:
    with pytest.raises(TopologyError, match=r"but LOCAL_WORLD_SIZE is not"):
        torchrun.read({**BY_HAND, "MASTER_ADDR": "node1", "LOCAL_RANK": "0"})
    with pytest.raises(TopologyError, match=r"but LOCAL_RANK is not"):
        torchrun.read({**BY_HAND, "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "2"})


def test_the_local_rank_follows_where_only_one_is_possible() -> None:
    one_each = torchrun.read({**BY_HAND, "MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "1"})
    assert (one_each.local_rank, one_each.node_rank, one_each.num_nodes) == (0, 1, 2)
    all_here = torchrun.read({**BY_HAND, "MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "2"})
    assert (all_here.local_rank, all_here.node_rank, all_here.num_nodes) == (1, 0, 1)
    one_group = torchrun.read({**BY_HAND, "MASTER_ADDR": "node1", "GROUP_WORLD_SIZE": "1"})
    assert (one_group.local_rank, one_group.local_world_size) == (1, 2)


def test_the_node_follows_from_the_local_world_size() -> None:
    place = torchrun.read(without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"))
    assert (place.node_rank, place.num_nodes) == (1, 2)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (("MASTER_ADDR",), "MASTER_ADDR is not set"),
        (("MASTER_PORT",), "MASTER_PORT is not set"),
        (("MASTER_ADDR", "MASTER_PORT"), "MASTER_ADDR and MASTER_PORT are not set"),
    ],
)
def test_several_processes_need_an_endpoint(missing: tuple[str, ...], words: str) -> None:
    with pytest.raises(TopologyError) as caught:
        torchrun.read(without(TORCHRUN, *missing))
    assert words in str(caught.value)
    assert "RANK=3 and WORLD_SIZE=4 are set" in str(caught.value)
    assert "Set MASTER_ADDR to the host of rank 0" in str(caught.value)


def test_an_empty_address_is_no_address() -> None:
    with pytest.raises(TopologyError, match="MASTER_ADDR is not set"):
        torchrun.read({**TORCHRUN, "MASTER_ADDR": ""})


@pytest.mark.parametrize(
    "name",
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
    ],
)
@pytest.mark.parametrize("value", ["-1", "one"])
def test_a_value_that_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(TopologyError, match=rf"{name} is '{value}'. Allowed: a whole number"):
        torchrun.read({**TORCHRUN, name: value})


def test_numbers_that_do_not_fit_are_named_with_what_was_seen() -> None:
    with pytest.raises(TopologyError, match=r"rank is 4, and must be from 0 to 3.*RANK=4, WORLD_SIZE=4"):
        torchrun.read({**TORCHRUN, "RANK": "4"})
