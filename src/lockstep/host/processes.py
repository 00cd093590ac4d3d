"""How processes end: with the one that started them, and what their exit code says."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when the one of this number, which started it, is gone, killed or not."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # it went before: while this process was being started, even


def name_signal(code: int) -> str:
    """The signal that ended a process with this negative exit code."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
