"""A small process beside the launcher: when that is killed, it ends what the job has left running.

Linux ends a rank with its launcher, but not the processes that the rank has started, nor a program that was not
started through our shim. They all carry a mark in their environment, by which they are found.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

VARIABLE = "LOCKSTEP_JOB"
"""The variable that holds the mark."""


class Keeper:
    """Begin it before threads are started: it is a fork of this process."""

    def __init__(self) -> None:
        self.mark = os.urandom(12).hex()
        """What the job's processes shall find in ``VARIABLE``."""
        self._pid, self._writer = 0, -1
        if sys.platform.startswith("linux"):
            reader, self._writer = os.pipe()
            self._pid = os.fork()
            if self._pid == 0:
                _keep(reader, self.mark)
            os.close(reader)

    def release(self, *, sweep: bool) -> None:
        """End it: nothing is left running, or (``sweep``) what is left shall be ended now."""
        if self._pid == 0:
            return
        with suppress(OSError):  # it may have been killed
            if not sweep:
                os.write(self._writer, b".")
        os.close(self._writer)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._pid = 0

    def end_group(self, group: int) -> None:
        """Kill what the job has left in a process group, except ourselves."""
        _kill(self.mark, group)


def _keep(reader: int, mark: str) -> NoReturn:
    """The life of the keeper: wait for the launcher's end of the pipe to be closed."""
    try:
        os.setsid()  # signals from the terminal are not for us
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # Whoever reads what the launcher prints shall see its end.
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        os.dup2(reader, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        if not os.read(3, 1):
            _kill(mark)
    finally:
        os._exit(0)


def _kill(mark: str, group: int | None = None) -> None:
    for _ in range(100):  # what is killed may have been starting another
        found = [pid for pid in _marked(mark) if group is None or _group(pid) == group]
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: str) -> list[int]:
    text = f"{VARIABLE}={mark}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if text in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def _group(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
