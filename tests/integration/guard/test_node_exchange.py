"""Watchers of several machines over a real store: who asks, who answers, who hears."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.blackbox.snapshot import Op, Raw, Snapshot
from lockstep.guard import node_exchange
from lockstep.guard.node_exchange import Exchange
from lockstep.job_store.signed_store import SignedStore


def box(rank: int, **more: Any) -> Snapshot:
    op = Op(seq=3, name="gather", signature="[2], float32", site="train.py:3", since=1.0)
    return Snapshot(
        rank=rank,
        world_size=3,
        node=rank,
        op=op,
        history=(op,),
        raw=Raw(name="all_reduce", number=4),
        stack=("train.py:3 in train",),
        pace=((1.0, 2.0, 3.0, 4.0, 5.0, 6.0),),
        **more,
    )


class Machines:
    """Three watchers' ends, each with connections of its own."""

    def __init__(self, nodes: int = 3) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.heard: dict[int, list[dict[str, Any]]] = {node: [] for node in range(nodes)}
        self.asked: dict[int, list[str]] = {node: [] for node in range(nodes)}
        self.ends = [self.join(node, nodes) for node in range(nodes)]

    def join(self, node: int, nodes: int) -> Exchange:
        return Exchange(
            self.connect,
            node=node,
            nodes=nodes,
            boxes=lambda about: self.answer(node, about),
            receive=lambda said: self.heard[node].append(said),
        )

    def answer(self, node: int, about: str) -> list[Snapshot]:
        self.asked[node].append(about)
        return [box(node)]

    def connect(self) -> Any:
        return SignedStore(dist.TCPStore("127.0.0.1", self.server.port, wait_for_workers=False), "secret", "guard")


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setattr(node_exchange, "PATIENCE", 20.0)  # an answer may be late where other programs have the cores
    made = Machines()
    yield made
    for end in made.ends:
        end.close()


def asks(end: Exchange, mine: list[Snapshot], about: str = "") -> list[Snapshot]:
    """Until it is its turn."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        found = end.collect(mine, about)
        if found is not None:
            return found
        time.sleep(0.01)
    pytest.fail("it never got its turn")


def test_who_asks_gets_the_boxes_of_all_machines(machines: Machines) -> None:
    found = asks(machines.ends[1], [box(1, words="mine")])
    assert sorted(found, key=lambda item: item.rank) == [box(0), box(1, words="mine"), box(2)]


def test_the_others_hear_what_a_question_is_about(machines: Machines) -> None:
    asks(machines.ends[0], [])  # all are connected
    asks(machines.ends[0], [], "pace")
    assert machines.asked == {0: [], 1: ["", "pace"], 2: ["", "pace"]}


def test_everybody_can_ask_again_and_again_and_all_at_once(machines: Machines) -> None:
    asks(machines.ends[0], [])  # all are connected: each has answered
    counts = [0, 0, 0]

    def ask(node: int) -> None:
        for _ in range(10):
            found = machines.ends[node].collect([box(node)])
            if found is not None:
                assert len(found) == 3
                counts[node] += 1
            time.sleep(0.01)

    threads = [threading.Thread(target=ask, args=(node,)) for node in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) >= 3, counts


def test_what_is_published_reaches_the_others_once(machines: Machines) -> None:
    asks(machines.ends[0], [])
    assert machines.ends[2].publish({"text": "out of step"})
    machines.ends[0].publish({"text": "indeed"})
    until = time.monotonic() + 10
    while time.monotonic() < until and len(machines.heard[1]) < 2:
        time.sleep(0.01)
    assert [said["text"] for said in machines.heard[1]] == ["out of step", "indeed"]
    assert [said["text"] for said in machines.heard[0]] == ["out of step"]


def test_a_machine_that_has_left_is_remembered_by_its_last_boxes(machines: Machines) -> None:
    asks(machines.ends[2], [])  # it is connected
    machines.ends[2].close([box(2, closed="finished")])
    found = asks(machines.ends[0], [box(0)])
    assert {item.rank: item.closed for item in found} == {0: "", 1: "", 2: "finished"}


def test_a_machine_that_does_not_answer_is_left_out(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_exchange, "PATIENCE", 0.3)
    alone = lambda: machines.connect().under("another")  # noqa: E731
    lonely = Exchange(alone, node=0, nodes=2, boxes=lambda about: [], receive=lambda said: None)
    assert asks(lonely, [box(0)]) == [box(0)]
    lonely.close()


def test_an_answer_that_comes_while_others_are_opened_counts(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 500 nodes answer takes longer to open than the patience with one of them."""
    store, unpack = machines.connect(), node_exchange._unpack

    def opens(data: bytes) -> list[Snapshot]:
        store.set("answer/9/1", node_exchange._pack([box(1)]))
        return unpack(data)

    monkeypatch.setattr(node_exchange, "_unpack", opens)
    store.set("answer/9/2", node_exchange._pack([box(2)]))
    assert {item.rank for item in machines.ends[0]._collect(store, 9, patience=0.0)} == {1, 2}
    assert machines.ends[0].silent == ()


def test_a_round_whose_opener_died_is_completed_by_another(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_exchange, "PATIENCE", 0.2)
    # Written, but not delivered: that is where it died.
    machines.connect().claim("round/1", '{"from": 2, "asks": "", "id": "x"}')
    assert {item.rank for item in asks(machines.ends[0], [box(0)])} == {0, 1, 2}


def test_a_watcher_that_comes_late_hears_of_what_was_said_before() -> None:
    machines = Machines(0)
    store = machines.connect()
    store.set("latest", "2")
    for number, text in ((1, "a"), (2, "b")):
        store.set(f"inbox/0/{number}", f'{{"from": 1, "id": "{text}", "text": "{text}"}}')
    heard: list[str] = []
    late = Exchange(
        machines.connect, node=0, nodes=2, boxes=lambda about: [], receive=lambda said: heard.append(said["text"])
    )
    until = time.monotonic() + 10
    while time.monotonic() < until and len(heard) < 2:
        time.sleep(0.01)
    late.close()
    assert heard == ["a", "b"]


def test_nothing_is_sent_while_nobody_asks(machines: Machines) -> None:
    asks(machines.ends[0], [])
    time.sleep(0.3)
    before = machines.server.num_keys()
    time.sleep(0.5)
    assert machines.server.num_keys() == before


def test_without_a_store_one_sees_only_oneself() -> None:
    def gone() -> Any:
        raise dist.DistNetworkError("the host has gone")

    end = Exchange(gone, node=0, nodes=2, boxes=lambda about: [], receive=lambda said: None)
    assert end.collect([box(0)]) == [box(0)]
    assert not end.publish({"text": "nobody hears this"})
    end.close()
