"""Where no launcher of ours reads the black boxes: on SIGTERM, report a peer that died before this rank ends too.

torchrun and mpirun answer the death of one rank with SIGTERM to the others, a moment later. The main thread is mostly
in C++ then, where no Python handler runs. So a thread is woken through Python's wakeup pipe, and does what the signal
would have done once the report is out. A rank whose native code holds the GIL for good ends by the SIGKILL that comes
after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from lockstep.host.threads import join

_ASKED = {signal.SIGTERM}
_installed: WeakSet[SigtermReport] = WeakSet()


class SigtermReport:
    """Calls ``report`` when SIGTERM comes, with whether the signal ends the process then: the script may handle it."""

    def __init__(self, report: Callable[[bool], None]) -> None:
        self._report = report
        self._once = threading.Lock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != -1:  # an event loop's: it stays, and the handler alone has to do
            signal.set_wakeup_fd(before)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
        self._thread = threading.Thread(target=self._listen, name="lockstep-sigterm", daemon=True)
        self._thread.start()
        _installed.add(self)

    def close(self) -> None:
        """SIGTERM does what it did before. Called on: the main thread."""
        _installed.discard(self)
        self._withdraw()
        os.close(self._write)  # wakes the thread
        join(self._thread, 5)
        os.close(self._read)

    def _withdraw(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        fd = signal.set_wakeup_fd(-1)
        if fd not in (-1, self._write):
            signal.set_wakeup_fd(fd)

    def _listen(self) -> None:
        while received := os.read(self._read, 64):
            if signal.SIGTERM in received:
                self._answer()

    def _on_signal(self, *_: Any) -> None:
        self._answer()

    def _answer(self) -> None:
        """In whichever of the two threads comes first."""
        if not self._once.acquire(blocking=False):
            return
        ends = signal.getsignal(signal.SIGTERM) == self._on_signal
        with contextlib.suppress(Exception):  # nothing may keep the process from ending
            self._report(ends)
        if ends:
            # Python sets handlers in the main thread only, and that one may never return to it.
            ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, None)
            os.kill(os.getpid(), signal.SIGTERM)
        self._once.release()


_held = threading.local()
"""The signal mask of a thread that forks, as it was before."""


def _before_fork() -> None:
    """Until the child has given up the pipe, which is its parent's, its SIGTERM would reach the parent."""
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED) if _installed else None


def _in_parent() -> None:
    if _held.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _in_child() -> None:
    for report in list(_installed):
        report._withdraw()
    _installed.clear()
    _in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
