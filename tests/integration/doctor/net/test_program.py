"""The whole examination without collectives, in threads that stand for ranks: real sockets, a real store."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.doctor.finding import Finding
from lockstep.doctor.net import program
from lockstep.doctor.net.results import NetReport, RankInfo
from lockstep.doctor.net.store_channel import StoreChannel
from lockstep.doctor.net.tcp_probe import Listener
from lockstep.errors import TopologyError
from lockstep.topology.topology import Topology

WORLD = 6
PER_MACHINE = 2


class Job:
    """Ranks, two to a node; each thread does what a process of the job would."""

    def __init__(self, patience: float = 20.0) -> None:
        self.store = dist.HashStore()
        self.options = program.NetOptions(rates=False, patience=patience)
        self.results: dict[int, Any] = {}
        self.alarms: list[Finding] = []

    def rank(self, rank: int, delay: float = 0.0, closed: bool = False) -> None:
        time.sleep(delay)
        node = rank // PER_MACHINE
        topology = Topology(
            rank=rank,
            world_size=WORLD,
            local_rank=rank % PER_MACHINE,
            local_world_size=PER_MACHINE,
            node_rank=node,
            num_nodes=WORLD // PER_MACHINE,
            device=torch.device("cpu"),
            backend="gloo",
            launcher="torchrun",
            reason="a test",
            device_reason="a test",
        )
        listener = Listener()
        own = RankInfo(
            rank=rank,
            host=f"n{node}",
            machine=f"n{node}",
            node=node,
            local_rank=rank % PER_MACHINE,
            address="127.0.0.9" if closed else "0.0.0.0",  # which Linux takes for this machine
            interface="eth0",
            port=1 if closed else listener.port,
            token=listener.token,
        )
        run = program._NetRun(
            StoreChannel(self.store, rank, WORLD), topology, self.options, lambda text: None, self.alarms.extend
        )
        found = [Finding(check="kernel", status="ok", what="Linux 6")] if rank % PER_MACHINE == 0 else []
        try:
            self.results[rank] = run.whole(own, found)
        except TopologyError as error:
            self.results[rank] = error
        finally:
            listener.close()

    def run(self, delays: dict[int, float] | None = None, closed: tuple[int, ...] = (), absent: int = -1) -> NetReport:
        threads = [
            threading.Thread(target=self.rank, args=(rank, (delays or {}).get(rank, 0.0), rank in closed))
            for rank in range(WORLD)
            if rank != absent
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return self.results[0]


def states(report: NetReport) -> dict[str, str]:
    return {finding.check: finding.status for finding in program.judged(report)}


def test_all_is_well() -> None:
    job = Job()
    report = job.run()
    assert states(report) == dict.fromkeys(("kernel", "ranks", "connections", "lines", "clocks"), "ok")
    assert len(report.links) == WORLD * (WORLD - 1) // 2
    assert report.group == list(range(WORLD))
    kernel = next(finding for finding in program.judged(report) if finding.check == "kernel")
    assert kernel.what == "all 3 nodes: Linux 6"
    assert [job.results[rank] for rank in range(1, WORLD)] == [None] * (WORLD - 1)


def test_one_that_never_comes_and_one_that_comes_too_late() -> None:
    job = Job(patience=0.8)
    report = job.run(delays={4: 1.8}, absent=1)
    assert report.missing == [1, 4]
    assert states(report)["ranks"] == "error"
    assert isinstance(job.results[4], TopologyError)
    assert "came after the others had stopped waiting for it" in str(job.results[4])
    assert len(report.links) == 6  # the four that were there


def test_one_that_nobody_can_connect_to_is_told_at_once_and_measured_from_its_own_side() -> None:
    job = Job()
    report = job.run(closed=(3,))
    assert {contact.target for contact in report.contacts} == {3}
    assert len(report.links) == WORLD * (WORLD - 1) // 2  # it can connect to the others
    assert report.group == [0, 1, 2, 4, 5]
    assert any("rank 3 on n1" in alarm.what for alarm in job.alarms)
    assert states(report)["connections"] == "error"


def test_without_rank_0_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_SLACK", 0.2)
    job = Job(patience=0.5)
    with pytest.raises(KeyError):
        job.run(absent=0)
    assert {type(result) for result in job.results.values()} == {TopologyError}
    assert "Rank 0, which leads the examination, did not come" in str(job.results[1])
