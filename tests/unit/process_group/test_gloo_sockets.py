"""Connections of a group that is kept: an event loop that nobody reads for comes to rest."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest

from lockstep.process_group import gloo_sockets


class Loop:
    """What gloo has: an epoll with a listener and a connection, which got bytes that nobody reads."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.far = socket.create_connection(self.listener.getsockname())
        self.near, _ = self.listener.accept()
        self.epoll = select.epoll()
        for one in (self.listener, self.near):
            self.epoll.register(one.fileno(), select.EPOLLIN)
        self.ports = frozenset({self.listener.getsockname()[1]})
        self.far.sendall(b"for a collective that is over")

    def woken(self) -> list[int]:
        return [fd for fd, _ in self.epoll.poll(0.2)]

    def close(self) -> None:
        for one in (self.epoll, self.near, self.far, self.listener):
            one.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_a_connection_that_was_shut_and_is_not_read_wakes_its_loop_once_more(loop: Loop) -> None:
    gloo_sockets.shut(gloo_sockets.connections(loop.ports, frozenset()))
    assert all(loop.woken() == [loop.near.fileno()] for _ in range(3))
    gloo_sockets.drain_closed_sockets(loop.ports)
    assert loop.woken() == [loop.near.fileno()]
    assert loop.woken() == []
    loop.epoll.unregister(loop.near.fileno())  # it can still be taken out, as gloo does


def test_the_listener_and_other_loops_are_left_alone(loop: Loop) -> None:
    other = Loop()
    try:
        gloo_sockets.drain_closed_sockets(loop.ports)
        assert loop.woken() == [loop.near.fileno()]
        assert all(other.woken() == [other.near.fileno()] for _ in range(3))
        with socket.create_connection(loop.listener.getsockname()):
            assert all(loop.woken() == [loop.listener.fileno()] for _ in range(3))
    finally:
        other.close()


def test_a_descriptor_that_its_owner_closes_meanwhile_has_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(gloo_sockets._borrow):
        """What a thread of gloo's does between two looks."""

        def __enter__(self) -> socket.socket | None:
            found = super().__enter__()
            os.close(self._fd)
            return found

    fd = socket.create_server(("127.0.0.1", 0)).detach()
    monkeypatch.setattr(gloo_sockets, "_borrow", Closed)
    assert gloo_sockets.listener_ports([fd]) == frozenset()


def test_nothing_happens_where_no_connection_is_left() -> None:
    gloo_sockets.drain_closed_sockets(frozenset())
    gloo_sockets.drain_closed_sockets(frozenset({1}))
