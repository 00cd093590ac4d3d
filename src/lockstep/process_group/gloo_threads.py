"""gloo's worker threads: waiting until they rest, before the process ends and before it forks.

A worker lets go of a collective's tensors a moment after its caller has the result, and needs the GIL for it. A thread
that asks for the GIL while Python shuts down is ended on the spot, in the middle of a destructor, and that ends the
process with SIGABRT ("terminate called without an active exception"). So a process that does not destroy its group,
which would wait for the workers, has to see them rest before it leaves.

A native thread that asks for the GIL first takes the interpreter's list of threads, without holding the GIL. Before
Python 3.12 a child that is forked at that moment waits for the list for ever, as nobody is left there to give it back:
a worker of a DataLoader that never starts. It happens where a collective is followed by a fork at once, as when the
order of an epoch has been agreed on and its workers are started.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

_WORKER = "pt_gloo_runloop"
_FORK_PATIENCE = 0.5
"""Seconds for which a fork waits for workers that do not rest: they work on a collective that the script has begun."""
_RESTS = 3
"""Looks in a row at which every worker must rest: one may sleep for an instant on a lock."""


def rest(patience: float, unnamed: bool) -> bool:
    """Wait until gloo's workers have nothing to do; False when one still has after ``patience`` seconds.

    ``unnamed``: there are workers, so where none has their name (torch 2.9) every thread counts that Python did not
    start. Without gloo that would be a user's own thread, and nobody's exit should wait for it.
    """
    deadline = time.monotonic() + patience
    rests = 0
    while rests < _RESTS:
        if time.monotonic() > deadline:
            return False
        rests = 0 if _any_busy(unnamed) else rests + 1
        time.sleep(0.001)  # leaves the GIL to them
    return True


def rest_before_fork(unnamed: bool) -> None:
    """Wait a moment, so that no worker is about to ask for the GIL: some milliseconds, where Python needs it."""
    if sys.version_info < (3, 12):
        rest(_FORK_PATIENCE, unnamed)


def _any_busy(unnamed: bool) -> bool:
    """Whether a worker runs or is about to (Linux; False where /proc is absent)."""
    running: dict[int, tuple[str, bool]] = {}
    with suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with suppress(OSError), open(f"/proc/self/task/{task}/stat", encoding="utf-8") as file:
                _, rest_of_line = file.read().split("(", 1)
                name, fields = rest_of_line.rsplit(")", 1)
                running[int(task)] = name, fields.split()[0] == "R"
    named = [runs for name, runs in running.values() if name == _WORKER]
    if named or not unnamed:
        return any(named)
    own = {thread.native_id for thread in threading.enumerate()}
    return any(runs for task, (_, runs) in running.items() if task not in own)
