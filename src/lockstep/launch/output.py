"""What the ranks print: into a file each, and onto the screen.

Each rank's stdout and stderr are a pipe, or a terminal of its own where the launcher has one, so that progress bars look as they
should. One thread reads them all. A line goes to the screen in one piece, whoever else is printing; a bar that rewrites its
line is passed on as it comes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

PATIENCE = 0.1
"""Seconds after which a line without an end is shown as it is."""
GATHERING = 0.3
"""Seconds in which the same line of several ranks counts as one, when lines are collapsed."""
_CHUNK = 1 << 16


@dataclass
class _Stream:
    rank: int
    name: str
    reader: int
    writer: int
    file: BinaryIO
    pending: bytes = b""
    since: float = 0.0
    fresh: bool = True
    """Whether the next byte begins a line on the screen."""


@dataclass
class _Line:
    text: bytes
    name: str
    ranks: list[int]
    due: float = field(default=0.0)


class Output:
    """The streams of all ranks of this machine."""

    def __init__(self, *, prefix: str = "0", collapse: bool = False) -> None:
        self._prefix = {"out": prefix in ("1", "3"), "err": prefix in ("2", "3")}
        self._collapse = collapse
        self._streams: dict[int, _Stream] = {}
        self._held: list[_Line] = []
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lockstep-output", daemon=True)
        self._thread.start()

    def open(self, rank: int, folder: Path) -> Mapping[str, int]:
        """Where a rank shall write: stream ("out", "err") -> file descriptor, to be closed by ``started``."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ends = {}
        for name, screen in (("out", sys.stdout), ("err", sys.stderr)):
            reader, writer = _terminal(screen) if screen.isatty() else os.pipe()
            os.set_blocking(reader, False)
            stream = _Stream(rank, name, reader, writer, open(folder / f"rank_{rank}.{name}", "ab", buffering=0))  # noqa: SIM115
            with self._lock:
                self._streams[reader] = stream
                self._selector.register(reader, selectors.EVENT_READ)
            ends[name] = writer
        self._wake()
        return ends

    def started(self) -> None:
        """Every rank has its streams now: let go of our ends of them, so that theirs are the last."""
        with self._lock:
            for stream in self._streams.values():
                if stream.writer >= 0:
                    os.close(stream.writer)
                    stream.writer = -1

    def close(self) -> None:
        """Show what is left, and end. Call it when the ranks are gone."""
        self.started()
        self._stopping = True
        self._wake()
        self._thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        self._selector.close()

    def flush(self, patience: float = 0.5) -> None:
        """Show what ranks that have ended had still to say, before something else is printed."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            with self._lock:
                quiet = not self._held and not any(stream.pending for stream in self._streams.values())
                waiting = [stream.reader for stream in self._streams.values()]
            if quiet and not _readable(waiting):
                return
            time.sleep(0.01)

    # --- the thread --------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        os.write(self._wake_writer, b".")

    def _run(self) -> None:
        while True:
            waiting = self._held or any(stream.pending for stream in self._streams.values())
            ready = self._selector.select(PATIENCE / 2 if waiting or self._stopping else None)
            stopping = self._stopping
            read = False
            for key, _ in ready:
                if key.fd == self._wake_reader:
                    os.read(self._wake_reader, _CHUNK)
                else:
                    read = self._read(self._streams[key.fd]) or read
            self._show_late(everything=stopping and not read)
            if stopping and not read:
                for stream in list(self._streams.values()):
                    self._end(stream)
                return

    def _read(self, stream: _Stream) -> bool:
        try:
            data = os.read(stream.reader, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # how a terminal says that its other side is closed
        if not data:
            self._end(stream)
            return False
        with contextlib.suppress(OSError):  # a full disk must not stop the job
            stream.file.write(data)
        stream.pending += data
        stream.since = time.monotonic()
        self._show(stream)
        return True

    def _show(self, stream: _Stream, everything: bool = False) -> None:
        """Pass whole lines on; and what rewrites its line, such as a progress bar, up to there."""
        cut = max(stream.pending.rfind(b"\n"), stream.pending.rfind(b"\r")) + 1
        if everything:
            cut = len(stream.pending)
        if not cut:
            return
        text, stream.pending = stream.pending[:cut], stream.pending[cut:]
        if not self._collapse:
            self._put(stream.name, self._with_rank(stream, text))
            return
        for line in text.splitlines(keepends=True):
            self._hold(stream, line)

    def _with_rank(self, stream: _Stream, text: bytes) -> bytes:
        if not self._prefix[stream.name]:
            return text
        mark = f"[rank {stream.rank}] ".encode()
        pieces = []
        for line in text.splitlines(keepends=True):
            pieces.append(mark + line if stream.fresh else line)
            stream.fresh = line.endswith((b"\n", b"\r"))
        return b"".join(pieces)

    def _hold(self, stream: _Stream, text: bytes) -> None:
        """Wait for a moment whether other ranks print the same."""
        for line in self._held:
            if line.text == text and line.name == stream.name and stream.rank not in line.ranks:
                line.ranks.append(stream.rank)
                return
        self._held.append(_Line(text, stream.name, [stream.rank], time.monotonic() + GATHERING))

    def _show_late(self, everything: bool) -> None:
        now = time.monotonic()
        for stream in list(self._streams.values()):
            if stream.pending and (everything or now - stream.since >= PATIENCE):
                self._show(stream, everything=True)
        ranks = {stream.rank for stream in self._streams.values()}
        while self._held and (everything or self._held[0].due <= now or ranks <= set(self._held[0].ranks)):
            line = self._held.pop(0)
            mark = f"[{name_ranks(line.ranks)}] ".encode() if len(line.ranks) < max(2, len(ranks)) else b""
            self._put(line.name, mark + line.text)

    def _put(self, name: str, text: bytes) -> None:
        screen: Any = sys.stdout if name == "out" else sys.stderr
        with contextlib.suppress(OSError, ValueError):  # whoever reads us has gone
            screen.flush()
            screen.buffer.write(text)
            screen.buffer.flush()

    def _end(self, stream: _Stream) -> None:
        if stream.pending:
            self._show(stream, everything=True)
        with self._lock:
            self._selector.unregister(stream.reader)
            del self._streams[stream.reader]
        os.close(stream.reader)
        if stream.writer >= 0:
            os.close(stream.writer)
        stream.file.close()


def name_ranks(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _terminal(screen: Any) -> tuple[int, int]:
    """A terminal of the same size, that passes lines on as they are."""
    import fcntl
    import pty
    import termios

    reader, writer = pty.openpty()
    mode = termios.tcgetattr(writer)
    mode[1] &= ~termios.OPOST
    termios.tcsetattr(writer, termios.TCSANOW, mode)
    with contextlib.suppress(OSError):
        fcntl.ioctl(writer, termios.TIOCSWINSZ, fcntl.ioctl(screen.fileno(), termios.TIOCGWINSZ, b"\0" * 8))
    return reader, writer


def _readable(fds: list[int]) -> bool:
    with selectors.DefaultSelector() as selector:
        for fd in fds:
            with contextlib.suppress(OSError, ValueError, KeyError):
                selector.register(fd, selectors.EVENT_READ)
        return any(True for _ in selector.select(0)) if selector.get_map() else False
