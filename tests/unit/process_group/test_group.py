"""What a group does without a job: what it asks the store for when it joins, names, and who listens to it."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist

from lockstep.job_store.signed_store import SignedStore
from lockstep.process_group.group import Group
from lockstep.topology.topology import Topology


@pytest.mark.parametrize(("backend", "reads"), [("gloo", True), ("nccl", False), ("cpu:gloo,cuda:nccl", False)])
def test_ports_are_exchanged_only_where_sockets_are_shut(backend: str, reads: bool) -> None:
    group = Group(Topology(rank=0, world_size=3, device=torch.device("cpu"), backend=backend))
    group._store = store = SignedStore(dist.HashStore(), "secret")
    for peer in (1, 2):
        store.set(f"generation_0/ports/{peer}", f"[{1000 + peer}]")
    before = store.raw.num_keys()
    group._exchange_ports(frozenset())
    assert group._peer_ports == ({1001, 1002} if reads else set())
    assert store.raw.num_keys() - before == reads


def test_only_the_latest_name_of_a_line_is_remembered() -> None:
    group = Group(Topology(rank=0, world_size=2, device=torch.device("cpu")))
    assert [group.ordinal("loader") for _ in range(3)] == [0, 1, 2]
    for number in range(500):
        assert [group.ordinal(f"save/{number}", "line 7") for _ in range(2)] == [0, 1]
    assert len(group._asked) == 2
    assert group.ordinal("loader") == 3


class Listener:
    """Notes what it is called for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def recovery_enabled(self) -> None:
        self.calls.append("recovery")

    def group_rebuilt(self) -> None:
        self.calls.append("rebuilt")


def test_listeners_are_called_for_as_long_as_they_live() -> None:
    group = Group(Topology(device=torch.device("cpu")))
    first, second = Listener(), Listener()
    first.calls = second.calls
    for listener in (first, second):
        group.add_listener(listener)
    group.enable_recovery()
    group.enable_recovery()  # it is enabled already
    assert second.calls == ["recovery", "recovery"]
    gone = weakref.ref(first)
    del first, listener
    third = Listener()
    group.add_listener(third)
    assert gone() is None
    group.recovery_enabled = False
    group.enable_recovery()
    assert (len(second.calls), third.calls) == (3, ["recovery"])
