"""The way to the store: real ports that nobody listens at, that are silent, and that open late."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from lockstep.doctor.finding import Finding
from lockstep.doctor.net import store_reachability
from lockstep.doctor.net.results import RankInfo
from lockstep.host.network import REFUSED, knock
from tests.ranks import free_port

OWN = RankInfo(rank=3, host="node1", interface="eth0", address="10.0.0.2")


@pytest.fixture
def closed() -> int:
    """A port at which nobody listens."""
    return free_port()


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that does not answer: as many wait to be let in as may."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        time.sleep(0.1)
        yield int(server.getsockname()[1])


def wait(port: int, patience: float, address: str = "127.0.0.1") -> tuple[str, list[Finding], list[str]]:
    alarms: list[Finding] = []
    words: list[str] = []
    return (
        store_reachability.wait_for(OWN, address, port, time.monotonic() + patience, words.append, alarms.extend),
        alarms,
        words,
    )


def test_an_open_way_is_not_spoken_of() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert wait(server.getsockname()[1], 5.0) == ("", [], [])


def test_rank_0_may_come_later(closed: int) -> None:
    def open_late() -> None:
        time.sleep(0.3)
        with socket.create_server(("127.0.0.1", closed)):
            done.wait(10)

    done = threading.Event()
    thread = threading.Thread(target=open_late)
    thread.start()
    reason, alarms, words = wait(closed, 10.0)
    done.set()
    thread.join()
    assert (reason, alarms) == ("", [])
    assert words[0] == f"waiting for the store at 127.0.0.1 port {closed}: {REFUSED}"


def test_refusals_are_told_after_a_while(closed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_reachability, "EARLY", 0.2)
    reason, (alarm,), _ = wait(closed, 0.6)
    assert reason == REFUSED
    assert alarm.status == "warning"
    assert f"rank 3 on node1 (eth0 10.0.0.2) finds nobody at 127.0.0.1 port {closed}, leaving by lo" in alarm.what


def test_silence_is_told_at_once_and_once(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_reachability, "ONE_TRY", 0.2)
    reason, (alarm,), _ = wait(silent, 0.6)
    assert reason == "no answer within 0.2 s"
    assert alarm.status == "error"
    assert "rank 3 on node1 (eth0 10.0.0.2) cannot connect to 127.0.0.1" in alarm.what
    assert "nc -vz 127.0.0.1" in alarm.fix


def test_a_name_that_is_none() -> None:
    reason, (alarm,), _ = wait(29500, 0.6, address="no.such.machine.invalid")
    assert alarm.status == "error"
    assert "no.such.machine.invalid port 29500" in alarm.what
    assert reason


@pytest.mark.parametrize("port", [70000, -1])
def test_a_port_that_is_none(port: int) -> None:
    assert knock("127.0.0.1", port, 1.0)
