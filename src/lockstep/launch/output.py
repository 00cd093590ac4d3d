"""What the ranks print: into a file each, and onto the screen.

Each rank's stdout and stderr are a pipe, or a terminal of its own where the launcher has one, so that progress bars
look as they should. One thread reads them all. A single rank is shown as it comes. Of several, a line goes to the
screen in one piece, whoever else is printing; a bar that rewrites its line is passed on at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.rundir import files
from lockstep.rundir.format_ranks import name_ranks

PATIENCE = 0.2
"""Seconds after which a line without an end is shown as it is, when several ranks print."""
GATHERING = 0.5
"""Seconds in which the same line of several ranks counts as one, when lines are collapsed."""
_CHUNK = 1 << 16
_CLEAR = b"\r\x1b[K"
_MOVES = re.compile(rb"\x1b\[[0-9;]*[A-HJf]")
"""What moves the cursor to another line, as several bars at once do."""
_LONGEST = 1 << 20
"""Bytes after which a line that has not ended is passed on."""
_LAST = 1 << 14
"""Bytes of a rank's stderr that are kept here, for what is said when it fails."""
_MOST_HELD = 10_000
"""Lines that may wait to be collapsed."""


@dataclass
class _Stream:
    rank: int
    name: str
    reader: int
    writer: int
    path: Path
    file: BinaryIO | None
    pending: bytearray = field(default_factory=bytearray)
    since: float = 0.0
    fresh: bool = True
    """Whether the next byte begins a line on the screen."""


@dataclass(frozen=True, kw_only=True)
class _OpenLine:
    """What stands on a screen without an end."""

    rank: int
    name: str
    bar: bytes = b""
    """The line, if it is one that a progress bar rewrites; then it can be drawn again below other lines."""


@dataclass
class _Line:
    number: int
    text: bytes
    name: str
    ranks: list[int]
    due: float


class Output:
    """The streams of all ranks of this machine."""

    def __init__(self, *, prefix: str = "0", collapse: bool = False) -> None:
        self._prefix = {"out": prefix in ("1", "3"), "err": prefix in ("2", "3")}
        self._collapse = collapse
        self._screens = {"out": _Screen(sys.stdout), "err": _Screen(sys.stderr)}
        self._streams: dict[int, _Stream] = {}
        self._ranks: set[int] = set()
        self._unfinished: dict[Any, _OpenLine] = {}
        """Screen -> the line on it that has no end yet."""
        self._own: deque[bytes] = deque()
        """Lines of the launcher's own that are to be printed."""
        self._noted: set[str] = set()
        self.last_errors: dict[int, bytearray] = {}
        """Rank -> the end of what it wrote to stderr since its last start."""
        self._held: deque[_Line] = deque()
        self._same: dict[tuple[str, bytes], deque[_Line]] = {}
        self._last: dict[tuple[str, int], int] = {}
        """Stream of a rank -> the line that it printed last; earlier ones are no match for its next line."""
        self._count = 0
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._stopping = False
        self._asked = threading.Event()
        self._shown = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-output", daemon=True)
        self._thread.start()

    def open(self, rank: int, folder: Path) -> Mapping[str, int]:
        """Where a rank shall write: stream ("out", "err") -> file descriptor, to be closed by ``started``."""
        ends = {}
        for name, screen in self._screens.items():
            path = folder / f"rank_{rank}.{name}"
            file = self._open_file(path)
            reader, writer = screen.stream()
            os.set_blocking(reader, False)
            with self._lock:
                self._ranks.add(rank)
                self.last_errors[rank] = bytearray()
                self._streams[reader] = _Stream(rank, name, reader, writer, path, file)
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

    def print(self, text: str) -> None:
        """A line of the launcher's own, after what the ranks have printed so far; not into anybody's line."""
        self._own.append(f"{text}\n".encode(errors="backslashreplace"))
        self.flush()

    def flush(self, patience: float = 1.0) -> None:
        """Show what the ranks have written so far, before something else is printed."""
        self._shown.clear()
        self._asked.set()
        self._wake()
        self._shown.wait(patience)

    def close(self) -> None:
        """Show what is left, and end. Call it when the ranks are gone."""
        self.started()
        self._stopping = True
        self._wake()
        self._thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        self._selector.close()

    @property
    def amid_line(self) -> bool:
        """Whether the last on the screen of stderr is a line without an end."""
        return self._screens["err"].key in self._unfinished

    # --- the thread --------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        os.write(self._wake_writer, b".")

    def _all(self) -> list[_Stream]:
        with self._lock:
            return list(self._streams.values())

    def _run(self) -> None:
        while True:
            waiting = self._held or any(stream.pending for stream in self._all())
            for key, _ in self._selector.select(PATIENCE / 2 if waiting else None):
                if key.fd == self._wake_reader:
                    os.read(self._wake_reader, _CHUNK)
                elif key.fd in self._streams:
                    self._read(self._streams[key.fd])
            asked, stopping = self._asked.is_set(), self._stopping
            if asked or stopping:
                for stream in self._all():
                    self._drain(stream)
            self._show_late(everything=asked or stopping)
            if stopping:
                for stream in self._all():
                    self._end(stream)
                self._show_late(everything=True)
                self._end_lines()
            while self._own:
                self._put("err", -1, self._own.popleft())
            if asked:
                self._asked.clear()
                self._shown.set()
            if stopping:
                return

    def _drain(self, stream: _Stream) -> None:
        """Read what is there. Not until its end: what a rank has left running may print for ever."""
        for _ in range(32):
            if not self._read(stream):
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
        self._keep(stream, data)
        if len(self._ranks) == 1:
            self._put(stream.name, stream.rank, data, stream)
        else:
            self._pass(stream, data)
        return True

    def _pass(self, stream: _Stream, data: bytes) -> None:
        """Pass whole lines on; and what rewrites its line, such as a progress bar."""
        stream.pending += data
        stream.since = time.monotonic()
        cut = max(data.rfind(b"\n"), data.rfind(b"\r"))
        if (cut >= 0 and data[cut : cut + 1] == b"\r") or len(stream.pending) > _LONGEST:
            self._show(stream, len(stream.pending))
        elif cut >= 0:
            self._show(stream, len(stream.pending) - len(data) + cut + 1)

    def _show(self, stream: _Stream, cut: int) -> None:
        text = bytes(stream.pending[:cut])
        del stream.pending[:cut]
        if not text:
            return
        if not self._collapse:
            self._put(stream.name, stream.rank, text, stream)
            return
        start = 0
        while start < len(text):
            end = text.find(b"\n", start) + 1 or len(text)
            self._hold(stream, text[start:end])
            start = end

    def _hold(self, stream: _Stream, text: bytes) -> None:
        """Wait for a moment whether other ranks print the same."""
        whose = (stream.name, stream.rank)
        same = self._same.setdefault((stream.name, text), deque())
        place = bisect_right(same, self._last.get(whose, -1), key=lambda line: line.number)
        if place < len(same) and _is_line(text):
            line = same[place]
            line.ranks.append(stream.rank)
        else:
            line = _Line(self._count, text, stream.name, [stream.rank], time.monotonic() + GATHERING)
            self._count += 1
            self._held.append(line)
            same.append(line)
        self._last[whose] = line.number

    def _show_late(self, everything: bool) -> None:
        now = time.monotonic()
        for stream in self._all():
            late = stream.pending and now - stream.since >= PATIENCE
            # It may be us who are late: then the rest of the line is there to be read.
            if stream.pending and (everything or (late and not self._read(stream))):
                self._show(stream, len(stream.pending))
        while self._held:
            line = self._held[0]
            whole = len(line.ranks) == len(self._ranks)
            if not (everything or whole or line.due <= now or len(self._held) > _MOST_HELD):
                break
            self._held.popleft()
            same = self._same[line.name, line.text]
            same.popleft()
            if not same:
                del self._same[line.name, line.text]
            mark = b"" if whole or not _is_line(line.text) else f"[{name_ranks(line.ranks)}] ".encode()
            self._put(line.name, line.ranks[0], mark + line.text)

    def _end(self, stream: _Stream) -> None:
        if stream.pending and self._collapse:
            stream.pending += b"\n"  # no more of this line will come, so it is a line
        if stream.pending:
            self._show(stream, len(stream.pending))
        with self._lock:
            self._selector.unregister(stream.reader)
            del self._streams[stream.reader]
        os.close(stream.reader)
        if stream.writer >= 0:
            os.close(stream.writer)
        if stream.file is not None:
            stream.file.close()

    # --- the files ---------------------------------------------------------------------------------------------

    def _open_file(self, path: Path) -> BinaryIO | None:
        try:
            files.make_folder(path.parent)
            return open(path, "ab", buffering=0, opener=files.private)
        except OSError as error:
            self._not_kept(path, error.strerror or str(error))
            return None

    def _keep(self, stream: _Stream, data: bytes) -> None:
        if stream.name == "err":
            # Here, too: the file may be on a disk that is full.
            last = self.last_errors[stream.rank]
            last += data
            del last[:-_LAST]
        if stream.file is None:
            return
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[stream.file.write(rest) :]
            if not os.fstat(stream.file.fileno()).st_nlink:
                self._not_kept(stream.path, "removed by somebody")
        except OSError as error:  # a full disk must not stop the job
            self._not_kept(stream.path, error.strerror or str(error))

    def _not_kept(self, path: Path, reason: str) -> None:
        way = "what ranks print is shown here only"
        self._note("disk", f"the log files in {path.parent} are incomplete ({reason}): {way}. The job continues.")

    # --- the screen --------------------------------------------------------------------------------------------

    def _put(self, name: str, rank: int, text: bytes, stream: _Stream | None = None) -> None:
        screen = self._screens[name]
        line = self._unfinished.get(screen.key)
        below = b""
        if line is not None and (line.rank, line.name) != (rank, name) and not text.startswith((b"\r", b"\n")):
            if line.bar and screen.is_terminal and text.endswith(b"\n"):
                # A progress bar stays the last line of the screen.
                screen.write(_CLEAR)
                below = line.bar
            elif line.rank != rank:
                # Somebody else's line stands there without an end; it must not swallow the beginning of this one.
                screen.write(b"\n")
                for interrupted in self._all():
                    interrupted.fresh = interrupted.fresh or interrupted.rank == line.rank
        if below:
            pass
        elif text.endswith(b"\n"):
            self._unfinished.pop(screen.key, None)
        else:
            self._unfinished[screen.key] = _OpenLine(rank=rank, name=name, bar=_bar_in(text))
        if stream is not None and self._prefix[name]:
            text = _with_rank(stream, text)
        if not screen.write(text + below):
            way = "nothing of it is shown" if name == "err" else "the files of the run directory have it all"
            self._note(name, f"nobody reads std{name} any more; the job continues, and {way}.")

    def _end_lines(self) -> None:
        """With several ranks, what the launcher says next begins a line."""
        for key in list(self._unfinished) if len(self._ranks) > 1 else ():
            next(screen for screen in self._screens.values() if screen.key == key).write(b"\n")
            del self._unfinished[key]

    def _note(self, what: str, text: str) -> None:
        if what not in self._noted:
            self._noted.add(what)
            self._screens["err"].write(f"lockstep launch: {text}\n".encode())


class _Screen:
    """Where a stream of the launcher's own goes; it may be closed, full for a moment, or lose its reader."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._fd = -1
        self._gone = file is None
        self.key: Any = object()
        """The same for two streams that go to the same place."""
        self.is_terminal = False
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no file, or closed
            file.flush()
            self._fd = file.fileno()
            place = os.fstat(self._fd)
            self.key = (place.st_dev, place.st_ino)
            self.is_terminal = os.isatty(self._fd)

    def stream(self) -> tuple[int, int]:
        """Both ends of what a rank writes into: a terminal if this is one, else a pipe."""
        if self._fd >= 0 and os.isatty(self._fd):
            with contextlib.suppress(OSError):  # there may be no terminals left
                return _terminal(self._fd)
        return os.pipe()

    def write(self, text: bytes) -> bool:
        """Whether it could be written; False once, when the reader has gone."""
        if self._gone:
            return True
        try:
            if self._fd < 0:
                self._file.write(text.decode(errors="replace"))
                return True
            rest = memoryview(text)
            while rest:
                rest = rest[self._some(rest) :]
        except (OSError, ValueError):
            self._gone = True
            return False
        return True

    def _some(self, text: memoryview) -> int:
        try:
            return os.write(self._fd, text)
        except BlockingIOError:  # somebody has made it non-blocking
            room = select.poll()
            room.register(self._fd, select.POLLOUT)
            room.poll(1000)
            return 0


def _bar_in(text: bytes) -> bytes:
    """The last line of a text, if it is rewritten from its beginning; empty if it moves the cursor otherwise."""
    head, rewritten, bar = text.rpartition(b"\n")[2].rpartition(b"\r")
    if not rewritten:
        return b""
    # Some print the return after the bar, and not before it.
    bar = bar or head.rpartition(b"\r")[2]
    return b"" if _MOVES.search(bar) or not bar.strip() else b"\r" + bar


def _is_line(text: bytes) -> bool:
    """Whether it stands for itself: not a part of a line, nor one that is rewritten."""
    return text.endswith(b"\n") and b"\r" not in text.removesuffix(b"\r\n")


def _with_rank(stream: _Stream, text: bytes) -> bytes:
    mark = f"[rank {stream.rank}] ".encode()
    pieces = []
    for line in text.splitlines(keepends=True):
        pieces.append(mark + line if stream.fresh else line)
        stream.fresh = line.endswith((b"\n", b"\r"))
    return b"".join(pieces)


def _terminal(screen: int) -> tuple[int, int]:
    """A terminal of the same size, that passes lines on as they are."""
    import fcntl
    import pty
    import termios

    reader, writer = pty.openpty()
    mode = termios.tcgetattr(writer)
    mode[1] &= ~termios.OPOST
    termios.tcsetattr(writer, termios.TCSANOW, mode)
    with contextlib.suppress(OSError):
        fcntl.ioctl(writer, termios.TIOCSWINSZ, fcntl.ioctl(screen, termios.TIOCGWINSZ, b"\0" * 8))
    return reader, writer
