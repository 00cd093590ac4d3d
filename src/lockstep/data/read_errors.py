"""What a failure to read data says: the rank, the samples, the user's own traceback."""

from __future__ import annotations

import traceback
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from lockstep.data.global_batch import GlobalBatch, name_samples
from lockstep.errors import PeerFailure
from lockstep.host.processes import name_signal
from lockstep.process_group.group import Group
from lockstep.torch_internals.data_loader import index_being_read, worker_processes

_TOLD = "_lockstep_told"
_ENDS = 1.0
"""Seconds in which a process ends whose connections have broken."""


def annotate_error(error: Exception, group: Group, round_: GlobalBatch | None) -> None:
    """Add to an error which samples were being read, and free the ranks that will wait for this one."""
    if isinstance(error, PeerFailure) or getattr(error, _TOLD, False):
        return  # who failed has told everybody
    at = index_being_read(error.__traceback__)
    ids = [at] if at is not None else list(round_.ids) if round_ is not None else []
    what = f"reading {name_samples(ids)}" if ids else "reading data"
    with suppress(AttributeError):  # Python 3.10 has no notes, and some exceptions no room for attributes
        setattr(error, _TOLD, True)
        error.add_note(f"(Lockstep: rank {group.rank} was {what}.)")  # type: ignore[attr-defined]
    if group.world_size > 1 and not group.scopes:
        details = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        with suppress(RuntimeError):  # the store may be gone; the user's own error is the one to show
            group.abort(f"{what}: {_line(error)}", leaving=True, details=details)


def of_lost_worker(error: Exception, batches: Any) -> Exception:
    """The error that names a worker of torch's loader that died while it handed a batch over; else the error itself.

    Torch names a worker that it finds dead while it waits. The connection to one that dies a moment later breaks with
    an error that says nothing of it.
    """
    if not isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) or "worker process" in str(error):
        return error
    workers = worker_processes(batches)
    try:
        # The connection breaks a moment before the process ends, and so does what is waited for here: only joined, one
        # has an exit code, and torch's handler of SIGCHLD finds nothing to raise for in whatever comes next.
        for ended in wait([worker.sentinel for worker in workers], _ENDS):
            next(worker for worker in workers if worker.sentinel == ended).join(_ENDS)
    except RuntimeError as named:  # by that handler, which was quicker
        return named
    lost = [(worker.pid, worker.exitcode) for worker in workers if worker.exitcode]
    if not lost:
        return error
    pid, code = lost[0]
    how = f"was killed by {name_signal(code)}" if code < 0 else f"exited with code {code}"
    return RuntimeError(
        f"DataLoader worker (pid {pid}) {how} while it handed over a batch. If nobody killed it, memory is the first "
        "suspect: look for the out-of-memory killer in `dmesg`, and at the size of /dev/shm."
    )


def _line(error: Exception) -> str:
    """The error in one line; one that comes out of a worker process holds its traceback, and ends with it."""
    text = str(error).strip().splitlines()
    if text and text[0].startswith("Caught ") and "worker process" in text[0]:
        return text[-1]
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
