"""gloo's own connections: finding them, and shutting them so that a blocked collective returns.

gloo has no way to end a collective that waits for a peer. Shutting its connected sockets makes the blocked call
raise. They are told from everybody else's by their ports: each rank's gloo listens on one port, so a connection
belongs to the group exactly when its near end is our listener or its far end is a peer's.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress


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
        with _borrow(fd) as sock:
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
