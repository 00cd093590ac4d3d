"""Real sockets: what is measured, and that a stranger, a wrong machine or a dead line is told."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from lockstep.doctor.net import links, tcp_probe
from lockstep.doctor.net.results import RankInfo


@pytest.fixture
def listener() -> Iterator[tcp_probe.Listener]:
    made = tcp_probe.Listener()
    yield made
    made.close()


def member(listener: tcp_probe.Listener, rank: int, **more: object) -> RankInfo:
    given = {"address": "127.0.0.1", "interface": "lo", "port": listener.port, "token": listener.token, **more}
    return RankInfo(rank=rank, host="here", **given)


def test_a_line_is_measured_both_ways(listener: tcp_probe.Listener) -> None:
    line = tcp_probe.dial("127.0.0.1", listener.port, listener.token, 1, 5.0)
    link = links.measure(line, own=1, peer=0, pings=5, target=0.02)
    assert (link.a, link.b, link.error) == (0, 1, "")
    assert link.latency is not None
    assert 0 < link.latency < 1
    assert link.forth is not None
    assert link.forth > 1e6
    assert link.back is not None
    assert link.back > 1e6
    assert link.offset is not None
    assert abs(link.offset) <= link.uncertain + 0.05  # one clock


def test_only_the_latency_when_no_time_is_given(listener: tcp_probe.Listener) -> None:
    line = tcp_probe.dial("127.0.0.1", listener.port, listener.token, 1, 5.0)
    link = links.measure(line, own=0, peer=1, pings=3, target=0)
    assert link.latency is not None
    assert link.forth is None


def test_somebody_else_at_that_address_is_no_peer(listener: tcp_probe.Listener) -> None:
    with pytest.raises(ConnectionRefusedError, match="somebody else answers there"):
        tcp_probe.dial("127.0.0.1", listener.port, "f" * 16, 1, 5.0)


def test_a_server_of_another_kind_is_no_peer() -> None:
    def answer() -> None:
        line, _ = server.accept()
        with line:
            line.recv(100)
            line.sendall(b"HTTP/1.1 400 Bad Request")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionRefusedError, match="somebody else"):
            tcp_probe.dial("127.0.0.1", server.getsockname()[1], "0" * 16, 1, 5.0)
        thread.join()


def test_a_stranger_gets_nothing(listener: tcp_probe.Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as stranger:
        stranger.sendall(b"GET / HTTP/1")  # as many bytes as are read
        assert stranger.recv(100) == b""


def test_a_line_that_dies_while_it_is_measured_is_named(
    listener: tcp_probe.Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = tcp_probe.dial("127.0.0.1", listener.port, listener.token, 1, 5.0)
    tcp_probe.ping(line)
    listener.close()
    link = links.measure(line, own=0, peer=1, pings=3, target=0.1)
    assert "while" in link.error


def test_a_line_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SILENCE", 0.2)
    ours, theirs = socket.socketpair()
    with theirs:
        started = time.monotonic()
        link = links.measure(ours, own=0, peer=1, pings=3, target=0.1)
    assert "nothing came for 0.2 s" in link.error
    assert time.monotonic() - started < 5


def test_everybody_is_tried_and_failures_are_told_apart(listener: tcp_probe.Listener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        closed = gone.getsockname()[1]
    own = member(listener, 0)
    members = {
        0: own,
        1: member(listener, 1),
        2: member(listener, 2, port=closed),
        3: member(listener, 3, address=None, interface=None, problem="GLOO_SOCKET_IFNAME=x names no interface"),
        4: RankInfo(rank=4, host="away", address="127.0.1.1", interface="lo", port=listener.port, token=listener.token),
        5: member(listener, 5, port=closed, others={"eth5": ["127.0.0.1"]}),
    }
    contacts, lines = links.reach(own, members, {1, 2, 3, 4, 5})
    errors = {contact.target: contact.error for contact in contacts}
    assert 1 not in errors
    assert "refused" in errors[2]
    assert "names no interface" in errors[3]
    assert "127.0.1.1 means the machine itself" in errors[4]
    assert list(lines) == [1]
    tcp_probe.hang_up(lines[1])
    assert links.reach(own, {0: own, 1: members[1]}, ()) == ([], {})  # tried, and not kept


def test_another_interface_that_can_be_reached_is_found(listener: tcp_probe.Listener) -> None:
    peer = RankInfo(
        rank=1,
        host="away",
        address="127.0.1.1",
        interface="lo",
        port=listener.port,
        token=listener.token,
        others={"eth5": ["0.0.0.0"]},  # which Linux takes for this machine
    )
    (contact,), lines = links.reach(member(listener, 0), {1: peer}, ())
    assert contact.error
    assert contact.instead == "eth5"
    assert lines == {}


def test_who_dials_is_the_same_everywhere() -> None:
    both = {0, 1}
    assert links.dialler((0, 1), both, set()) == 0
    assert links.dialler((0, 1), both, {(0, 1)}) == 1
    assert links.dialler((0, 1), both, {(0, 1), (1, 0)}) is None
    assert links.dialler((0, 1), {1}, set()) == 1  # rank 0 went away before it could say
    assert links.dialler((0, 1), {0}, {(0, 1)}) is None
    assert links.dialler((0, 1), set(), set()) is None


def test_a_clock_that_is_ahead_is_seen() -> None:
    ahead = (
        "import sys, time; real = time.time; time.time = lambda: real() + 100\n"
        "from lockstep.doctor.net.tcp_probe import Listener\n"
        "here = Listener(); print(here.port, here.token, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", ahead], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        port, token = other.stdout.readline().split()
        line = tcp_probe.dial("127.0.0.1", int(port), token, 0, 5.0)
        link = links.measure(line, own=0, peer=1, pings=5, target=0)
    assert link.offset is not None
    assert abs(link.offset - 100) <= link.uncertain + 0.05
