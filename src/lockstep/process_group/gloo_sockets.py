"""gloo's own connections: finding them, and shutting them so that a blocked collective returns.

gloo has no way to end a collective that waits for a peer. Shutting its connected sockets makes the blocked call
raise. They are told from everybody else's by their ports: each rank's gloo listens on one port, so a connection
belongs to the group exactly when its near end is our listener or its far end is a peer's.

A connection on which bytes arrived for a collective that is over is never read again, so gloo never learns that it
was shut: its event loop is woken for it without end, and takes a whole core. ``drain_closed_sockets`` ends that.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import select
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_NOTICE = 0.05
"""Seconds in which gloo notices that a connection was shut."""
_MODIFY = 3  # EPOLL_CTL_MOD, which the select module does not name
_REGISTERED = re.compile(r"^tfd:\s*(\d+) events:\s*([0-9a-f]+) data:\s*([0-9a-f]+)", re.MULTILINE)


def list_fds() -> frozenset[int]:
    """The open file descriptors of this process (Linux; empty where /proc is absent)."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()
    return frozenset(fd for fd in map(int, names) if _is_open(fd))


def _is_open(fd: int) -> bool:
    # The listing names the descriptor it was read through, which is closed by now.
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def listener_ports(fds: Iterable[int]) -> frozenset[int]:
    """The TCP ports that the listening sockets among ``fds`` listen on."""
    ports = set()
    for fd in fds:
        with _borrow(fd) as sock, suppress(OSError):  # its owner, gloo's thread, may close it right now
            if sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(sock.getsockname()[1])
    return frozenset(ports)


def connections(own_ports: frozenset[int], peer_ports: frozenset[int]) -> dict[int, int]:
    """This process's TCP connections from or to these ports: descriptor -> inode."""
    return {fd: inode for fd, inode, near, far in _ends(list_fds()) if near in own_ports or far in peer_ports}


def _ends(fds: Iterable[int]) -> Iterator[tuple[int, int, int, int]]:
    """Each connected socket's descriptor, inode, near port and far port."""
    for fd in fds:
        with _borrow(fd) as sock, suppress(OSError):
            if sock is not None and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield fd, os.fstat(fd).st_ino, sock.getsockname()[1], sock.getpeername()[1]


def shut(found: dict[int, int]) -> int:
    """Shut these connections, skipping descriptors that meanwhile name something else; how many were shut."""
    count = 0
    for fd, inode in found.items():
        with suppress(OSError):
            if os.fstat(fd).st_ino != inode:
                continue
            with _borrow(fd) as sock:
                if sock is not None:
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def drain_closed_sockets(ports: frozenset[int]) -> None:
    """Keep a group that listened on these ports, and that outlives its end, from spinning in its event loop.

    gloo gets a moment to notice that its connections were shut. What it does not notice by then, it never will.
    """
    deadline = time.monotonic() + _NOTICE
    while any(connected for _, connected in _loops(ports)):
        if time.monotonic() > deadline:
            disarm(ports)
            return
        time.sleep(0.005)


def disarm(ports: frozenset[int]) -> None:
    """Have the event loop that listens on one of these ports be woken once more for each connection, and never again.

    They stay registered, so that gloo can still take them out. Nothing happens where there is no epoll.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for epoll, connected in _loops(ports):
        for fd, events, data in connected:
            event = _Event(events=events | select.EPOLLONESHOT, data=data)
            libc.epoll_ctl(epoll, _MODIFY, fd, ctypes.byref(event))


def _loops(ports: frozenset[int]) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """The epoll descriptors that have a listener on one of these ports, each with what else is registered there."""
    for epoll, registered in _polled():
        listening = {fd for fd, _, _ in registered if listener_ports([fd])}
        if listener_ports(listening) & ports:
            yield epoll, [one for one in registered if one[0] not in listening]


def _polled() -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """Each epoll descriptor of this process with what is registered there: descriptor, events and data."""
    for fd in list_fds():
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventpoll]":
                lines = _REGISTERED.findall(Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii"))
                yield fd, [(int(target), int(events, 16), int(data, 16)) for target, events, data in lines]


class _Event(ctypes.Structure):
    _pack_ = 1 if platform.machine() == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


class _borrow:
    """A socket object on a descriptor that belongs to somebody else: never closed by us."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._socket: socket.socket | None = None

    def __enter__(self) -> socket.socket | None:
        try:
            if stat.S_ISSOCK(os.fstat(self._fd).st_mode):
                candidate = socket.socket(fileno=self._fd)
                if candidate.family in (socket.AF_INET, socket.AF_INET6) and candidate.type == socket.SOCK_STREAM:
                    self._socket = candidate
                else:
                    candidate.detach()
        except OSError:
            self._socket = None
        return self._socket

    def __exit__(self, *exception: object) -> None:
        if self._socket is not None:
            self._socket.detach()
