"""Ending threads that run beside a script."""

from __future__ import annotations

import sys
import threading
import time

_FINALIZERS = 60.0
"""Seconds for finalizers of the script's objects; torch's loader gives each of its workers 5."""


def join(thread: threading.Thread, seconds: float) -> None:
    """Wait until a thread has ended, for so long; longer while it runs finalizers.

    The collector runs in whatever thread it is due in, and then finalizes what the script has left: a loader with
    persistent workers waits for these. A thread that is still in native code when Python shuts down aborts the process.
    """
    thread.join(seconds)
    deadline = time.monotonic() + _FINALIZERS
    while thread.is_alive() and _is_finalizing(thread) and time.monotonic() < deadline:
        thread.join(0.1)


def _is_finalizing(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
