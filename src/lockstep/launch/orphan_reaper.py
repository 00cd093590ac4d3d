"""A small process beside the launcher: when that is killed, it ends what the job has left running, and sweeps up.

Linux ends a rank with its launcher, but not the processes that the rank has started, nor a program that was not
started through our shim. They all carry a mark in their environment, by which they are found.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

from lockstep.launch import leftovers

_STARTING = 1.0
"""Seconds in which a process that was being started when the launcher was killed carries the mark."""


class OrphanReaper:
    """Begin it before threads are started: it is a fork of this process."""

    def __init__(self) -> None:
        self.mark = leftovers.make_folder()
        """What the job's processes shall find in ``leftovers.VARIABLE``."""
        self._pid, self._writer = 0, -1
        if sys.platform.startswith("linux"):
            reader, self._writer = os.pipe()
            self._pid = os.fork()
            if self._pid == 0:
                _keep(reader, self.mark)
            os.close(reader)

    def release(self, *, sweep: bool) -> None:
        """End it: nothing is left running, or (``sweep``) what is left shall be ended now."""
        if self._pid:
            with suppress(OSError):  # it may have been killed
                if not sweep:
                    os.write(self._writer, b".")
            os.close(self._writer)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0
        leftovers.remove_files(self.mark)

    def end_group(self, group: int) -> None:
        """Kill what the job has left in a process group, except ourselves."""
        leftovers.end_marked(self.mark, group)


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
            leftovers.end_marked(mark)
            time.sleep(_STARTING)
            leftovers.end_marked(mark)
            leftovers.remove_files(mark)
    finally:
        os._exit(0)
