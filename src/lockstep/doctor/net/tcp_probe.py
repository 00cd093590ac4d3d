"""A plain TCP line between two ranks: to see whether they can talk at all, and how fast, without any library between.

Every rank listens, and serves whoever connects from a thread: the one that connects asks, the other answers. So a rank
that is busy, or waits for something else, can still be measured against; and nothing here can hang, since every
socket has a time limit.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator

_HELLO = struct.Struct("!8sI")
"""Who is meant, by the beginning of its token, and who calls."""
_ASK = struct.Struct("!cQ")
"""What is asked, and how many bytes."""
_CLOCK = struct.Struct("!d")
_SHARE = struct.Struct("!d")
_SENT_AGAIN, _SENT = (100, 136) if sys.platform == "linux" else (0, 0)
"""Where Linux keeps these numbers of packets in its `tcp_info`."""
_CHUNK = 1 << 20
IDLE = 600.0
"""Seconds for which a line may be silent before its server lets go of it."""


class Listener:
    """Where the others reach this rank."""

    def __init__(self, address: str | None = None) -> None:
        """Listen at an address of this node; without one, at all of them."""
        self.token = secrets.token_hex(8)
        self._server = _serve_everywhere() if address is None else _serve_at(address)
        self.port = int(self._server.getsockname()[1])
        self._lines: set[socket.socket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="lockstep-doctor-listen", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                line, _ = self._server.accept()
            except OSError:
                return
            self._lines.add(line)
            threading.Thread(target=self._serve, args=(line,), name="lockstep-doctor-line", daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        try:
            self._serve_until_the_end(line)
        finally:
            self._lines.discard(line)

    def _serve_until_the_end(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, struct.error), line:
            line.settimeout(10.0)  # a stranger that connects and says nothing
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            token, _ = _HELLO.unpack(_exactly(line, _HELLO.size))
            if token != self.token.encode()[:8]:
                return
            line.sendall(self.token.encode())
            line.settimeout(IDLE)
            _answer(line)

    def close(self) -> None:
        """Let go of all lines."""
        self._closed = True
        for sock in (self._server, *tuple(self._lines)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._thread.join(2.0)


def _serve_at(address: str) -> socket.socket:
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=512)


def _serve_everywhere() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    return socket.create_server(("", 0), backlog=512)


def _answer(line: socket.socket) -> None:
    """Serve one line until it ends."""
    buffer = memoryview(bytearray(_CHUNK))
    while True:
        what, size = _ASK.unpack(_exactly(line, _ASK.size))
        if what == b"p":
            line.sendall(_CLOCK.pack(time.time()))
        elif what == b"t":
            _receive(line, size, buffer)
            line.sendall(b"k")
        elif what == b"g":
            _send(line, size, buffer)
        elif what == b"r":
            line.sendall(_SHARE.pack(_sent_again(line)))
        else:
            return


def dial(address: str, port: int, token: str, rank: int, limit: float) -> socket.socket:
    """A line to a rank; OSError when there is none to be had, also when somebody else answers there."""
    deadline = time.monotonic() + limit
    line = socket.create_connection((address, port), timeout=limit)
    try:
        line.settimeout(max(0.1, deadline - time.monotonic()))
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(_HELLO.pack(token.encode()[:8], rank))
        try:
            answer = _exactly(line, len(token))
        except EOFError:
            answer = b""
        if answer != token.encode():
            raise ConnectionRefusedError(0, "somebody else answers there: the address leads to another node")
    except BaseException:
        line.close()
        raise
    return line


# --- measuring, on the side that has dialled -------------------------------------------------------------------------


def ping(line: socket.socket) -> tuple[float, float]:
    """One round trip: its seconds, and by how much the other's clock seemed ahead of ours."""
    before, started = time.time(), time.perf_counter()
    line.sendall(_ASK.pack(b"p", 0))
    (theirs,) = _CLOCK.unpack(_exactly(line, _CLOCK.size))
    seconds = time.perf_counter() - started
    return seconds, theirs - (before + seconds / 2)


def rate(line: socket.socket, *, take: bool, target: float, most: int = 1 << 32) -> float:
    """Bytes a second to the other side, or, to ``take``, from it: more and more until it lasts ``target`` seconds."""
    buffer = memoryview(bytearray(_CHUNK))
    size = 1 << 16
    while True:
        started = time.perf_counter()
        line.sendall(_ASK.pack(b"g" if take else b"t", size))
        if take:
            _receive(line, size, buffer)
        else:
            _send(line, size, buffer)
            _exactly(line, 1)
        seconds = max(1e-9, time.perf_counter() - started)
        if seconds >= target or size >= most:
            return size / seconds
        # Never more than eight times as much: what a first burst shows is not what the line keeps up.
        size = min(most, size * 8, max(size * 2, int(size / seconds * target * 1.2)))


def sent_again(line: socket.socket) -> tuple[float, float]:
    """The share of packets that were lost and sent again: of those from here, and of those from the other side."""
    line.sendall(_ASK.pack(b"r", 0))
    (theirs,) = _SHARE.unpack(_exactly(line, _SHARE.size))
    return _sent_again(line), theirs


def _sent_again(line: socket.socket) -> float:
    if not _SENT:
        return 0.0
    info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT + 4)
    if len(info) < _SENT + 4:
        return 0.0  # a kernel that does not count what was sent
    again, sent = (struct.unpack_from("=I", info, place)[0] for place in (_SENT_AGAIN, _SENT))
    return again / sent if sent else 0.0


def hang_up(line: socket.socket) -> None:
    """End a line that was dialled."""
    with contextlib.suppress(OSError):
        line.sendall(_ASK.pack(b"q", 0))
    line.close()


def _exactly(line: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = line.recv(count - len(parts))
        if not part:
            raise EOFError("the line was closed")
        parts += part
    return bytes(parts)


def _receive(line: socket.socket, size: int, buffer: memoryview) -> None:
    for count in _chunks(size):
        have = 0
        while have < count:
            got = line.recv_into(buffer[have:count])
            if not got:
                raise EOFError("the line was closed")
            have += got


def _send(line: socket.socket, size: int, buffer: memoryview) -> None:
    for count in _chunks(size):
        line.sendall(buffer[:count])


def _chunks(size: int) -> Iterator[int]:
    while size > 0:
        count = min(size, _CHUNK)
        yield count
        size -= count
