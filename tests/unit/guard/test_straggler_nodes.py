"""Watchers of two machines over a real store and real boxes: who is slow is asked only when all wait, and told once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.blackbox.box import Box
from lockstep.blackbox.peers import box_path
from lockstep.guard import node_exchange, straggler
from lockstep.guard.watcher import Watcher
from lockstep.job_store.signed_store import SignedStore
from lockstep.rundir.layout import RunDirectory

ALONE = (0.001, 0.004, 0.005, 0.020, 0.0005, 0.0)
WAITS = (0.001, 0.004, 0.005, 0.065, 0.0500, 0.0)
LATE = (0.001, 0.004, 0.055, 0.065, 0.0001, 0.0)
NODES = 2


class Counted:
    """A connection that counts what is asked of it."""

    def __init__(self, store: Any, calls: list[str]) -> None:
        self._store, self._calls = store, calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(name)
        return getattr(self._store, name)


class Cluster:
    """A watcher a machine, each with a run directory, and the ranks' boxes in them."""

    def __init__(self, folder: Path) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.calls: list[str] = []
        self.said: list[list[str]] = [[] for _ in range(NODES)]
        self.runs = [RunDirectory(path=folder / f"run{node}") for node in range(NODES)]
        self.watchers = [
            Watcher(run, tell=said.append, stop=lambda found: pytest.fail(found.text))
            for run, said in zip(self.runs, self.said, strict=True)
        ]
        for node, watcher in enumerate(self.watchers):
            watcher.join(self._connect, node, NODES)

    def _connect(self) -> Any:
        store = dist.TCPStore("127.0.0.1", self.server.port, wait_for_workers=False)
        return SignedStore(Counted(store, self.calls), "", "guard")

    def steps(self, *machines: list[tuple[float, ...]]) -> None:
        """The ranks of each machine, and what all steps of each rank are like."""
        ranks = [(node, step) for node, machine in enumerate(machines) for step in machine]
        for rank, (node, step) in enumerate(ranks):
            box = Box.create(
                box_path(self.runs[node].boxes, rank),
                rank=rank,
                world_size=len(ranks),
                local_rank=0,
                node=node,
                host=f"node{node}",
                pid=os.getpid(),
                device="cpu",
            )
            for _ in range(straggler.STEPS + 1):
                box.pace(*step)

    def look(self, times: int = 4) -> None:
        """All watchers, some times."""
        for _ in range(times):
            for watcher in self.watchers:
                assert watcher.poll() is None

    def rounds(self) -> int:
        """Questions asked and findings told."""
        store = self._connect()
        return int(store.get("latest")) if store.peek("latest") is not None else 0

    def heard(self, node: int) -> list[str]:
        """What the machine's screen shows, a moment later."""
        until = time.monotonic() + 10
        while not self.said[node] and time.monotonic() < until:
            time.sleep(0.02)
        return self.said[node]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(node_exchange, "PATIENCE", 20.0)
    monkeypatch.setattr(straggler, "SETTLE", 0.0)
    made = Cluster(tmp_path)
    until = time.monotonic() + 20
    while made.calls.count("wait") < NODES and time.monotonic() < until:
        time.sleep(0.01)
    yield made
    for watcher in made.watchers:
        watcher.close()


def test_a_healthy_job_asks_nothing(cluster: Cluster) -> None:
    cluster.steps([ALONE, ALONE], [ALONE, ALONE])
    assert sorted(cluster.calls) == ["compare_set", "compare_set", "wait", "wait"]  # each machine's, when it came
    cluster.look(20)
    assert len(cluster.calls) == 4
    assert cluster.said == [[], []]


@pytest.mark.parametrize("slow", [0, 1])
def test_the_one_rank_of_a_machine_is_named_by_the_other(cluster: Cluster, slow: int) -> None:
    cluster.steps(*([LATE] if node == slow else [WAITS] for node in range(NODES)))
    cluster.look()
    (line,) = cluster.heard(0)
    assert line.startswith(f"lockstep guard: Rank {slow} (node{slow}, cpu) is slower than the other ranks: 60 ms")
    assert "most of it in backward (+50 ms)" in line
    assert cluster.said[1] == []
    assert cluster.rounds() == 1 + (slow == 0)  # machine 1 has asked, and told machine 0


def test_a_machine_that_sees_it_alone_tells_without_asking(cluster: Cluster) -> None:
    cluster.steps([WAITS, WAITS], [WAITS, LATE])
    cluster.watchers[1].poll()
    (line,) = cluster.heard(0)
    assert "Rank 3 (node1, cpu)" in line
    cluster.look()
    assert (cluster.rounds(), len(cluster.said[0]), cluster.said[1]) == (1, 1, [])


def test_what_two_machines_find_is_told_once(cluster: Cluster) -> None:
    cluster.steps([LATE, WAITS], [WAITS, WAITS])
    cluster.look()
    assert cluster.rounds() == 2  # machine 1 has asked and told, and machine 0 has known
    cluster.watchers[0].close()  # it has heard all
    assert ["Rank 0 (node0, cpu)" in line for line in cluster.said[0]] == [True]


def test_a_slow_machine_is_named(cluster: Cluster) -> None:
    cluster.steps([WAITS, WAITS], [LATE, LATE])
    cluster.look()
    (line,) = cluster.heard(0)
    assert line.startswith(
        "lockstep guard: Ranks 2-3 (node1, cpu) are slower than those of the other machines: 60 ms of their"
    )


def test_a_slow_network_is_asked_about_once_by_all(cluster: Cluster) -> None:
    cluster.steps([WAITS, WAITS], [WAITS, WAITS])
    cluster.look(10)
    assert cluster.rounds() == 1
    assert cluster.said == [[], []]


def test_whoever_reaches_nobody_tells_it_here(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.steps([WAITS, WAITS], [WAITS, LATE])
    with monkeypatch.context() as patch:
        patch.setattr(cluster.watchers[1]._elsewhere, "_store", None)
        cluster.watchers[1].poll()
    assert ["Rank 3 (node1, cpu)" in line for line in cluster.said[1]] == [True]
