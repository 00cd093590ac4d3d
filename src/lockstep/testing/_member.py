"""The outside of one rank's process: start it, talk to it, see how it ends, end it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Literal

from lockstep.config import env
from lockstep.testing import _rank
from lockstep.testing.outcome import DIED, Outcome, describe_exit

# Bounds on waits that normally take milliseconds (the first start: the seconds of importing torch on a busy machine).
START_SECONDS = 120.0
KILL_SECONDS = 5.0

_OUTPUT_BYTES = 1 << 20


class RankProcess:
    """The parent's view of one rank's process."""

    def __init__(self, rank: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self.rank = rank
        self._folder = folder
        self.pipe: Connection[bytes, bytes]
        self.pipe, theirs = context.Pipe()
        # Never written to: that it closes when this process ends is its message.
        lifeline, self._lifeline = context.Pipe(duplex=False)
        self._theirs = (theirs, lifeline)
        self.process: ForkServerProcess = context.Process(
            target=_rank.main, args=(rank, *self._theirs, folder), name=f"lockstep-rank{rank}"
        )

    def start(self) -> None:
        """Fork the process and give it its ends of the pipes."""
        self.process.start()
        for end in self._theirs:
            end.close()

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self.process.pid is not None
        return self.process.pid

    def send(self, word: bytes) -> None:
        """Give the rank a word; one that is dead already is found by `look`."""
        with suppress(OSError):
            self.pipe.send_bytes(word)

    def poll(self, started: float) -> Outcome | None:
        """How this rank ended, or None as long as it has not."""
        dead = bool(wait([self.process.sentinel], 0))
        # In this order: a rank that reports and then ends has reported.
        if self.pipe.poll(0):
            with suppress(EOFError, OSError):
                self.pipe.recv_bytes()
                return self._reply(started)
        elif not dead:
            return None
        at = time.monotonic()
        self.process.join(KILL_SECONDS)
        code = self.process.exitcode
        text = describe_exit(code)
        return self.failure(at - started, error_type=DIED, error_line=text, error_text=text, exit_code=code)

    def failure(
        self, seconds: float, *, error_type: str, error_line: str, error_text: str, exit_code: int | None = None
    ) -> Outcome:
        """An outcome that is not a success, with the output so far."""
        return Outcome(
            rank=self.rank,
            ok=False,
            error_type=error_type,
            error_line=error_line,
            error_text=error_text,
            exit_code=exit_code,
            output=_tail(self._file("output")),
            seconds=seconds,
        )

    def stacks(self) -> str:
        """What the rank wrote when it was asked for its stacks."""
        return _tail(self._file("stacks"))

    def kill(self) -> None:
        """Kill the process and those it started, without waiting."""
        self._lifeline.close()
        if self.process.pid is not None:
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait_for_end(self, deadline: float) -> None:
        """Wait for a killed process to be gone, and let go of what belonged to it."""
        for end in (self.pipe, *self._theirs):
            end.close()
        if self.process.pid is not None:
            self.process.join(max(0.0, deadline - time.monotonic()))
            with suppress(ValueError):  # still there, in a state no signal reaches
                self.process.close()

    def _reply(self, started: float) -> Outcome:
        reply: _rank.Reply = pickle.loads(self._file("reply").read_bytes())
        seconds = reply.at - started
        if reply.error_type is not None:
            return self.failure(
                seconds,
                error_type=reply.error_type,
                error_line=reply.error_line,
                error_text=reply.error_text,
                exit_code=reply.exit_code,
            )
        try:
            value = pickle.loads(reply.value) if reply.value else None
        except Exception as error:
            text = f"what the function returned cannot be unpickled here: {type(error).__name__}: {error}"
            return self.failure(seconds, error_type=type(error).__name__, error_line=text, error_text=text)
        return Outcome(rank=self.rank, ok=True, value=value, output=_tail(self._file("output")), seconds=seconds)

    def _file(self, kind: Literal["reply", "output", "stacks"]) -> Path:
        return _rank.file_of(self._folder, self.rank, kind)


def start(members: Sequence[RankProcess]) -> None:
    """Start the processes, and wait until each has set itself up."""
    deadline = time.monotonic() + START_SECONDS
    ensure_server()
    problems: list[BaseException] = []

    def start_all() -> None:
        try:
            for member in members:
                member.start()
        except BaseException as problem:
            problems.append(problem)

    # multiprocessing waits for the server's answer without a limit of its own.
    thread = threading.Thread(target=start_all, name="lockstep-pool-start", daemon=True)
    thread.start()
    thread.join(START_SECONDS)
    if problems:
        raise RuntimeError("The fork server could not start the ranks; its own error is on stderr.") from problems[0]
    waiting = [] if thread.is_alive() else list(members)
    while waiting and (left := deadline - time.monotonic()) > 0:
        wait([handle for member in waiting for handle in (member.pipe, member.process.sentinel)], left)
        for member in list(waiting):
            try:
                if member.pipe.poll(0) and member.pipe.recv_bytes() == _rank.READY:
                    waiting.remove(member)
                elif not member.process.is_alive():
                    raise EOFError
            except (EOFError, OSError):
                member.process.join(KILL_SECONDS)
                end = describe_exit(member.process.exitcode)
                raise RuntimeError(f"Rank {member.rank} {end}, while starting; its own error is on stderr.") from None
    if waiting or thread.is_alive():
        raise RuntimeError(
            f"The ranks were not ready after {START_SECONDS:.0f} s. The fork server imports "
            "lockstep.testing._preload first: import it by hand to see whether it ends."
        )


def ensure_server() -> None:
    """Start the server that ranks are forked from, unless it runs. It ends with this process."""
    # A test module is imported in every rank, and imports pytest.
    extra = ["pytest"] if "pytest" in sys.modules else []
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch", "numpy", *extra, "lockstep.testing._preload"]
    )
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # One thread: numpy's linear algebra would start its own while being imported.
    with env.patched({"OMP_NUM_THREADS": "1", "PYTHONPATH": path}):
        forkserver.ensure_running()


def _tail(file: Path) -> str:
    """The end of a file, or nothing when there is none."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
            return stream.read().decode(errors="backslashreplace")
    except FileNotFoundError:
        return ""
