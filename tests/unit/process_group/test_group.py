"""What a rank asks the store for when it joins, without a job."""

from __future__ import annotations

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
