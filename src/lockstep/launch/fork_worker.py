"""The inside of a rank that was forked: it settles in its new process, calls the function, reports how that ended."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lockstep.config import env
from lockstep.host.processes import die_with_parent
from lockstep.rundir import crash_report

LENGTH = struct.Struct("!Q")
"""Goes before each piece of news, so that its end is known."""
_sending = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """What one rank is started with."""

    rank: int
    """Its number in the job."""
    local_rank: int
    """Its number on this machine."""
    variables: Mapping[str, str | None]
    """What its environment has beside ours; None removes."""


@dataclass(frozen=True, kw_only=True)
class Pipes:
    """(reading end, writing end) of each way from a rank to the launcher."""

    out: tuple[int, int]
    err: tuple[int, int]
    news: tuple[int, int]
    """What is no text: things to display, and how the function ended."""
    closed: set[int] = field(default_factory=set)

    @classmethod
    def make(cls) -> Pipes:
        """New ones, that never block who reads."""
        made = cls(out=os.pipe(), err=os.pipe(), news=os.pipe())
        for reader in made.readers().values():
            os.set_blocking(reader, False)
        return made

    def readers(self) -> dict[str, int]:
        """The launcher's ends, by name."""
        return {"out": self.out[0], "err": self.err[0], "news": self.news[0]}

    def close_readers(self) -> None:
        """Let go of the launcher's ends. Harmless when repeated."""
        self._close(self.out[0], self.err[0], self.news[0])

    def close_writers(self) -> None:
        """Let go of the rank's ends. Harmless when repeated."""
        self._close(self.out[1], self.err[1], self.news[1])

    def _close(self, *ends: int) -> None:
        for end in ends:
            if end not in self.closed:
                self.closed.add(end)
                os.close(end)


@dataclass(frozen=True, kw_only=True)
class RankFunction:
    """What every rank is to do."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    threads: int
    """CPU threads for each rank."""
    kept: Any = None
    """A store of the parent's: the copy that a rank has must not be taken down."""


def live(call: RankFunction, place: RankEnvironment, pipes: Pipes, every: Sequence[Pipes]) -> None:
    """The whole life of a rank's process."""
    # What was garbage in the parent stays: a destructor there may wait for threads that only the parent has.
    gc.freeze()
    os.setpgid(0, 0)  # what the rank starts itself ends with it, and an interrupt comes from the launcher alone
    parent = multiprocessing.parent_process()
    die_with_parent(os.getppid() if parent is None or parent.pid is None else parent.pid)
    signal.set_wakeup_fd(-1)  # an event loop of the parent's
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in every:
        if other is not pipes:
            other.close_readers()
            other.close_writers()
    pipes.close_readers()
    _redirect(pipes)
    _redirect_display(pipes)
    faulthandler.enable(file=2)
    with env.patched(place.variables):
        import torch

        torch.set_num_threads(call.threads)
        report = _call(call, place)
        _flush()
        _send(pipes, report)
        if report.failed:
            os._exit(report.exit_code)
        _leave_job()
        _flush()


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """How the function ended on a rank."""

    value: bytes = b""
    words: crash_report.CrashReport | None = None
    exit_code: int = 0

    @property
    def failed(self) -> bool:
        """Whether it did not return."""
        return self.words is not None


@dataclass(frozen=True, kw_only=True)
class Display:
    """Something that a rank wants shown in the notebook: a call of IPython's display publisher."""

    method: str
    """Of the publisher."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def show(self) -> None:
        """Do it here, in the notebook's own process."""
        publisher = display_publisher()
        if publisher is not None:
            getattr(publisher, self.method)(*self.args, **self.kwargs)


def display_publisher() -> Any:
    """What IPython shows pictures and tables with; None where there is no IPython."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython.get_ipython(), "display_pub", None) if ipython is not None else None


def _send(pipes: Pipes, news: RankReport | Display) -> None:
    data = pickle.dumps(news)
    with _sending, open(pipes.news[1], "wb", closefd=False) as file:
        file.write(LENGTH.pack(len(data)) + data)


def _call(call: RankFunction, place: RankEnvironment) -> RankReport:
    attempt = place.variables.get("LOCKSTEP_ATTEMPT") or ""
    try:
        value = call.function(*call.args)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return RankReport(value=_pack(None))
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        trace = error.__traceback__
        last = crash_report.from_exception(
            type(error),
            error,
            # This frame says nothing to the reader.
            trace.tb_next if trace is not None and trace.tb_next is not None else trace,
            rank=place.rank,
            local_rank=place.local_rank,
            attempt=attempt,
        )
        return RankReport(words=last, exit_code=code & 0xFF or 1)
    try:
        return RankReport(value=_pack(value))
    except Exception as error:
        wrong = TypeError(
            f"the function returned {type(value).__qualname__}, which cannot be sent to the notebook ({error}). Return "
            "numbers, tensors, or what else can be pickled"
        )
        last = crash_report.from_exception(
            TypeError, wrong, None, rank=place.rank, local_rank=place.local_rank, attempt=attempt
        )
        return RankReport(words=last, exit_code=1)


def _pack(value: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _redirect(pipes: Pipes) -> None:
    """Write to the launcher's pipes: Python's streams, native code, and log handlers that hold the old streams."""
    old = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
    os.dup2(pipes.out[1], 1)
    os.dup2(pipes.err[1], 2)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        if isinstance(handler, logging.StreamHandler) and id(handler.stream) in old:
            # Not setStream: it flushes the old one first.
            handler.stream = getattr(sys, old[id(handler.stream)])


def _redirect_display(pipes: Pipes) -> None:
    """Have the notebook's process show what is displayed here: a forked kernel refuses to."""
    publisher = display_publisher()
    if publisher is None:
        return

    def forward(method: str) -> Callable[..., None]:
        def send(*args: Any, **kwargs: Any) -> None:
            _send(pipes, Display(method=method, args=args, kwargs=kwargs))

        return send

    for method in ("publish", "clear_output"):
        setattr(publisher, method, forward(method))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about widgets that are not installed
        from tqdm import asyncio, auto
    # In a kernel it makes widgets, which need a kernel to talk to; bars of text arrive.
    auto.tqdm = asyncio.tqdm_asyncio


def _leave_job() -> None:
    """As a script does when it ends. Looked up, not imported: what was never used needs no closing."""
    try:
        current = sys.modules.get("lockstep.current")
        if current is not None:
            current.reset()
    except Exception:
        traceback.print_exc()


def _flush() -> None:
    with suppress(Exception):  # the function may have closed or replaced them
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
