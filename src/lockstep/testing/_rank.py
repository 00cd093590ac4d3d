"""The inside of one rank's process: receive a call, run it, report how it ended."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import io
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from lockstep.config import env
from lockstep.errors import first_line

READY, RUN, RESET, DONE = b"ready", b"run", b"reset", b"done"

# SIGUSR2 belongs to the library under test, which may register it for a file of its own, or unregister it.
STACKS_SIGNAL = signal.SIGRTMIN + 7 if sys.platform == "linux" else signal.SIGUSR2

# A rank that failed stays this long before its process ends, so that others that fail for the same reason say so
# themselves; then its sockets close, and whoever waits for it finds out, as in a real job.
LINGER_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class RankRequest:
    """One call, the same for every rank, and the surroundings to make it in."""

    call: bytes
    """Pickle of (function, args, kwargs); opened only once the path is set."""
    path: list[str]
    """The parent's ``sys.path``."""
    cwd: str
    """The parent's working directory."""
    environ: Mapping[str, str]
    """The parent's environment."""
    overrides: Mapping[str, str | None]
    """What the test adds to a rank's environment; None removes."""
    world_size: int
    """How many ranks."""
    port: int
    """Where rank 0 may host a store."""

    def variables(self, rank: int) -> dict[str, str]:
        """The whole environment of one rank."""
        placed: dict[str, str | None] = {
            **self.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            **self.overrides,
        }
        return {name: value for name, value in placed.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """How the call ended on one rank."""

    value: bytes | None = None
    """Pickle of what the function returned; None when it failed."""
    error_type: str | None = None
    """Class name of the exception."""
    error_line: str = ""
    """Class and message, the first line of it."""
    error_text: str = ""
    """The traceback."""
    exit_code: int | None = None
    """For SystemExit, the code it asked for."""
    at: float
    """Moment of the end, by the machine's monotonic clock."""


def file_of(folder: Path, rank: int, kind: Literal["reply", "output", "stacks"]) -> Path:
    """Where a rank leaves its reply, its output, its stacks."""
    return folder / f"rank{rank}.{kind}"


def request_file(folder: Path) -> Path:
    """Where the parent leaves the request."""
    return folder / "request"


def main(rank: int, pipe: Connection[bytes, bytes], lifeline: Connection[bytes, bytes], folder: Path) -> None:
    """Serve calls until the parent closes the pipe, or a call fails.

    Only single words travel through the pipe: a word cannot block a sender, nor arrive in part. All else is in files.
    """
    _die_with_parent(lifeline)
    _redirect(file_of(folder, rank, "output"))
    # The C handler writes to this file's descriptor: it stays open as long as this function runs.
    stacks = file_of(folder, rank, "stacks").open("w")
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
    faulthandler.enable()
    # multiprocessing would make "forkserver" the way in which this process starts its own, say a DataLoader's.
    multiprocessing.set_start_method(None, force=True)
    import numpy
    import torch

    torch.set_num_threads(1)
    # The server's state, the same in all ranks, would hide that nobody has seeded it.
    numpy.random.seed()
    pipe.send_bytes(READY)
    while True:
        try:
            word = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        reply = _run(rank, folder) if word == RUN else _reset()
        _flush()
        file_of(folder, rank, "reply").write_bytes(pickle.dumps(reply))
        pipe.send_bytes(DONE)
        if reply.value is None:
            pipe.poll(LINGER_SECONDS)
            os._exit(1)


def _run(rank: int, folder: Path) -> Reply:
    os.truncate(file_of(folder, rank, "output"), 0)
    try:
        request: RankRequest = pickle.loads(request_file(folder).read_bytes())
        sys.path[:] = request.path
        os.chdir(request.cwd)
        # A variable that the last call left behind is not wanted either, so it goes with the difference.
        wanted: dict[str, str | None] = dict.fromkeys(env.snapshot())
        wanted.update(request.variables(rank))
        with env.patched(wanted):
            function, args, kwargs = pickle.loads(request.call)
            return _call(function, args, kwargs)
    except BaseException as error:
        return _failure(error, time.monotonic())


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reply:
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        at = time.monotonic()
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            error.__traceback__ = error.__traceback__.tb_next  # this frame says nothing to the reader
        return _failure(error, at)
    at = time.monotonic()
    try:
        return Reply(value=pickle.dumps(value), at=at)
    except Exception as error:
        unsendable = TypeError(f"The function returned {type(value).__qualname__}, which cannot be pickled: {error}")
        return _failure(unsendable, at)


def _only_line(error: BaseException, only: str) -> str:
    """Class and message in one line, also where the message begins with line breaks."""
    head, _, rest = only.partition("\n")
    return f"{head.rstrip()} {first_line(rest)}" if str(error)[:1].isspace() and first_line(rest) else head


def _failure(error: BaseException, at: float) -> Reply:
    text = "".join(traceback.format_exception(error))
    # The class and the message also stand at the end of the traceback, but there they may be followed by notes.
    only = "".join(traceback.format_exception_only(type(error), error)).strip()
    exit_code = None
    if isinstance(error, SystemExit):
        # As the interpreter does: no code is success, a text is printed and counts as 1.
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
    return Reply(
        error_type=type(error).__name__, error_line=_only_line(error, only), error_text=text, exit_code=exit_code, at=at
    )


def _reset() -> Reply:
    """Leave the job this process is in, if any. Looked up, not imported: what was never used needs no closing."""
    try:
        current = sys.modules.get("lockstep.current")
        if current is not None:
            current.reset()
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        # Stores and DDP models that sit in reference cycles hold threads and sockets.
        gc.collect()
        return Reply(value=b"", at=time.monotonic())
    except BaseException as error:
        return _failure(error, time.monotonic())


def _die_with_parent(lifeline: Connection[bytes, bytes]) -> None:
    """Have this process and all it starts killed when the parent is gone, even while blocked in native code.

    The parent holds the other end of this pipe and never writes. When it closes, by whatever kind of death, the
    kernel signals the process group that owns this end.
    """
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    else:

        def watch() -> None:
            with suppress(EOFError, OSError):
                lifeline.recv_bytes()
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=watch, name="lockstep-pool-lifeline", daemon=True).start()


def _redirect(output: Path) -> None:
    """Send the output of this process, native code included, to a file, each line at once: it may be the last."""
    target = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def _flush() -> None:
    with suppress(Exception):  # a function may have closed or replaced them
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
