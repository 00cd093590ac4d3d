"""Ranks that are forked from this process, for functions that no other process could find: those of a notebook.

Two things a fork needs care with:

- OpenMP's workers do not come along, and the thread that had them waits for them forever. So ranks are forked from a
  thread that has never computed anything: it becomes a rank's main thread, and gets workers of its own.
- What a notebook has put in the place of ``sys.stdout`` needs threads of its own, which do not come along either. So a
  rank writes to pipes, native code included, and this process shows what it reads there.
"""

from __future__ import annotations

import codecs
import contextvars
import gc
import io
import multiprocessing
import os
import pickle
import queue
import selectors
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from string import Template
from typing import Any

from lockstep.errors import UsageError
from lockstep.launch.failure_report import how_it_ended
from lockstep.launch.fork_worker import LENGTH, Display, Pipes, RankEnvironment, RankFunction, RankReport, live
from lockstep.rundir import crash_report

GRACE = 5.0
"""Seconds that ranks get to end by themselves when they are told to."""
SETTLE = 0.3
"""Seconds after a failure in which others that fail of themselves may still say so."""
PATIENCE = 3.0
"""Seconds to wait for the cause, when all that is known so far is that ranks have lost each other."""
PARTIAL = 0.1
"""Seconds after which a line without an end is shown as it is."""
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one rank ended."""

    rank: int
    returned: bool = False
    value: Any = None
    words: crash_report.CrashReport | None = None
    """What it said of its failure; None when it could not say anything."""
    exit_code: int | None = None
    """Of its process; minus the signal's number where one ended it."""
    stopped: bool = False
    """Whether it was still running when it was told to end."""

    def in_words(self) -> str:
        """Its end, in one line."""
        if self.returned:
            return "returned"
        if self.words is not None and self.words.kind == "SystemExit":
            return f"left with sys.exit({self.words.message})"
        if self.words is not None:
            first = (self.words.message.strip().splitlines() or [""])[0]
            return f"{self.words.kind}: {first}" if first else self.words.kind
        if self.stopped:
            return "was still running, and was ended"
        return describe_exit(self.exit_code)


def describe_exit(code: int | None) -> str:
    """The end of a process that said nothing, in words."""
    if code is None:
        return "ended in a way that could not be seen: something else in this process waits for its children"
    if code >= 0:
        return f"its process ended with exit code {code}, without the function having returned"
    if code == -signal.SIGKILL:
        return "killed: by the operating system because memory ran out, or by kill -9 (SIGKILL)"
    return how_it_ended(code)


class Forks:
    """The ranks of this machine, from their start to their end. Used by the thread that made it."""

    def __init__(
        self, call: RankFunction, places: Sequence[RankEnvironment], *, interval: float, prefix: str | None
    ) -> None:
        self._interval = interval
        self._selector = selectors.DefaultSelector()
        context = multiprocessing.get_context("fork")
        every: list[Pipes] = []
        self._ranks: list[_Rank] = []
        for place in places:
            pipes = Pipes.make()
            every.append(pipes)
            process = context.Process(target=live, args=(call, place, pipes, every), name=f"rank {place.rank}")
            self._ranks.append(_Rank(place=place, process=process, pipes=pipes, prefix=_mark(prefix, place)))

    def run(self, news: Callable[[], bool]) -> list[Ended]:
        """Start the ranks and stay until all have ended; in rank order, how.

        After a failure here, or when ``news`` says that there was one elsewhere, those that still run are ended. An
        interrupt is passed on to them; a second one kills.
        """
        gc.collect()
        forker = _Forker()
        try:
            try:
                for rank in self._ranks:
                    forker.start(rank.process)
                    self._listen(rank)
                self._watch(news)
                self._end(signal.SIGTERM)
            except KeyboardInterrupt:
                forker.finish()
                self._end(signal.SIGINT)
                raise
        finally:
            self._kill()
            # A rank dies with the thread that forked it, so that goes last.
            forker.close()
            self._close()
        return [rank.ended() for rank in self._ranks]

    # --- in this process ---------------------------------------------------------------------------------------

    def _listen(self, rank: _Rank) -> None:
        rank.pipes.close_writers()
        with suppress(OSError):  # the rank does it too: whoever comes first
            os.setpgid(rank.process.pid, rank.process.pid)
        for name, reader in rank.pipes.readers().items():
            self._selector.register(reader, selectors.EVENT_READ, (rank, name))
        self._selector.register(rank.process.sentinel, selectors.EVENT_READ, (rank, "sentinel"))

    def _watch(self, news: Callable[[], bool]) -> None:
        deadline = None
        while any(rank.running for rank in self._ranks):
            self._turn(self._interval)
            failed = [rank for rank in self._ranks if rank.failed]
            if not failed and news():
                return
            if failed and deadline is None:
                deadline = time.monotonic() + PATIENCE
            if deadline is not None and any(rank.is_cause for rank in failed):
                deadline = min(deadline, time.monotonic() + SETTLE)
            if deadline is not None and time.monotonic() >= deadline:
                return

    def _turn(self, seconds: float) -> None:
        """Wait for something to happen, and take note of it."""
        late = any(rank.has_partial for rank in self._ranks)
        for key, _ in self._selector.select(min(seconds, PARTIAL) if late else seconds):
            rank, name = key.data
            if name == "sentinel":
                self._selector.unregister(key.fd)
            else:
                self._read(rank, name, key.fd)
        for rank in self._ranks:
            rank.show_late()
            if rank.running and rank.has_gone():
                for name, reader in rank.pipes.readers().items():
                    while self._read(rank, name, reader):
                        pass
                rank.running = False
                rank.show_late(everything=True)

    def _read(self, rank: _Rank, name: str, reader: int) -> bool:
        try:
            data = os.read(reader, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            with suppress(KeyError):
                self._selector.unregister(reader)
            return False
        rank.take(name, data)
        return True

    def _end(self, number: signal.Signals) -> None:
        """Tell those that still run to end, and give them time for it."""
        for rank in self._ranks:
            if rank.running:
                rank.stopped = not rank.failed and rank.report is None
                rank.send(number)
        deadline = time.monotonic() + GRACE
        while any(rank.running for rank in self._ranks) and time.monotonic() < deadline:
            self._turn(0.05)

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.running and rank.process.pid is not None:
                rank.send(signal.SIGKILL)
        while any(rank.running and rank.process.pid is not None for rank in self._ranks):
            self._turn(0.05)

    def _close(self) -> None:
        self._selector.close()
        for rank in self._ranks:
            rank.pipes.close_writers()
            rank.pipes.close_readers()
            if not rank.running:
                with suppress(ValueError):
                    rank.process.close()


class _Rank:
    """One rank, as the launcher sees it."""

    def __init__(self, *, place: RankEnvironment, process: Any, pipes: Pipes, prefix: str) -> None:
        self.place = place
        self.process = process
        self.pipes = pipes
        self.running = True
        self.stopped = False
        self._exit_code: int | None = None
        self._received = bytearray()
        self.report: RankReport | None = None
        """What the rank said of how the function ended; None before, or when it never got to it."""
        self._shown = {"out": _Shown(prefix), "err": _Shown(prefix)}

    def take(self, name: str, data: bytes) -> None:
        """What the rank wrote."""
        if name == "news":
            self._received += data
            while (news := self._next()) is not None:
                self._receive(news)
        else:
            self._shown[name].add(data)
            self._show(name)

    def _next(self) -> RankReport | Display | None:
        size = LENGTH.size
        if len(self._received) < size:
            return None
        (length,) = LENGTH.unpack_from(self._received)
        if len(self._received) < size + length:
            return None
        news: RankReport | Display = pickle.loads(self._received[size : size + length])
        del self._received[: size + length]
        return news

    def _receive(self, news: RankReport | Display) -> None:
        if isinstance(news, RankReport):
            self.report = news
            return
        self.show_late(everything=True)  # what was printed before comes before
        try:
            news.show()
        except Exception as error:
            print(f"rank {self.place.rank}: what it displays cannot be shown: {error}", file=sys.stderr)

    @property
    def failed(self) -> bool:
        """Whether it is known to have failed."""
        return self.report.failed if self.report is not None else not self.running

    @property
    def is_cause(self) -> bool:
        """Whether it failed of itself, not because another one did."""
        said = self.report.words if self.report is not None else None
        return self.failed and (said is None or not said.follows)

    @property
    def has_partial(self) -> bool:
        return any(shown.pending for shown in self._shown.values())

    def show_late(self, everything: bool = False) -> None:
        """Show lines that have no end yet, when they have waited long enough."""
        for name, shown in self._shown.items():
            if shown.pending and (everything or time.monotonic() - shown.since >= PARTIAL):
                self._show(name, everything=True)

    def _show(self, name: str, everything: bool = False) -> None:
        text = self._shown[name].cut(everything)
        if text:
            screen = sys.stdout if name == "out" else sys.stderr
            with suppress(OSError, ValueError):  # whoever reads us has gone
                screen.write(text)
                screen.flush()

    def send(self, number: signal.Signals) -> None:
        """Signal the rank and what it has started."""
        try:
            os.killpg(self.process.pid, number)
        except OSError:  # it has not come to making its own group yet
            with suppress(OSError):
                os.kill(self.process.pid, number)

    def has_gone(self) -> bool:
        """Whether the process has ended; what it had started is ended with it."""
        if self.process.pid is None:
            return True
        try:
            # Looked at without taking it away: until then its number cannot be given to another process.
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
        except ChildProcessError:
            return True
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self._exit_code = self.process.exitcode
        return True

    def ended(self) -> Ended:
        """How it ended."""
        report = self.report
        rank = self.place.rank
        if report is None:
            return Ended(rank=rank, exit_code=self._exit_code, stopped=self.stopped)
        if report.failed:
            return Ended(rank=rank, exit_code=report.exit_code, words=report.words, stopped=self.stopped)
        if self._exit_code != 0:
            code = self._exit_code
            end = describe_exit(code) if code is None or code < 0 else f"exit code {code}"
            print(f"rank {rank}: the function returned, but then its process did not end well: {end}", file=sys.stderr)
        return Ended(rank=rank, returned=True, value=_unpack(report.value, rank), exit_code=0)


class _Shown:
    """What one stream of a rank has written and was not shown yet."""

    def __init__(self, prefix: str) -> None:
        self.pending = ""
        self.since = 0.0
        self._prefix = prefix
        self._fresh = True
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, data: bytes) -> None:
        self.pending += self._decode(data)
        self.since = time.monotonic()

    def cut(self, everything: bool) -> str:
        """Whole lines, and what rewrites its line, such as a progress bar, up to there."""
        end = len(self.pending) if everything else max(self.pending.rfind("\n"), self.pending.rfind("\r")) + 1
        text, self.pending = self.pending[:end], self.pending[end:]
        if not self._prefix:
            return text
        pieces = []
        for line in text.splitlines(keepends=True):
            pieces.append(self._prefix + line if self._fresh else line)
            self._fresh = line.endswith(("\n", "\r"))
        return "".join(pieces)


def _mark(template: str | None, place: RankEnvironment) -> str:
    if not template:
        return ""
    names = {"role_name": "default", "rank": str(place.rank), "local_rank": str(place.local_rank)}
    return Template(template).safe_substitute(names)


class _Forker:
    """A thread that only forks, and lives as long as what it forked."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-forker", daemon=True)
        self._thread.start()

    def start(self, process: Any) -> None:
        """Fork."""
        self._idle.clear()
        self._asked.put(process)
        error = self._started.get()
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait for a start that an interrupt came into."""
        if self._asked.empty():
            self._idle.wait(GRACE)

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._idle.set()
        while (process := self._asked.get()) is not None:
            error: BaseException | None = None
            try:
                with _quiet():
                    self._context.run(process.start)
            except BaseException as caught:
                error = caught
            self._idle.set()
            self._started.put(error)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Python 3.12 warns of the very dangers that this file is about.
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        yield


def _unpack(data: bytes, rank: int) -> Any:
    """A rank's value, its tensors on the CPU: the notebook's own process does not touch the accelerator."""
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        raise UsageError(
            f"What rank {rank} returned cannot be read here ({type(error).__name__}: {error}). Return numbers, "
            "tensors, or what else can be pickled."
        ) from error
