"""How the script ended, where Python calls no hook: read off the frame in which it ran."""

from __future__ import annotations

import dis
import os
import sys
import threading
from types import FrameType


def script_frame() -> FrameType | None:
    """The frame of the script that Python runs as ``__main__``; None where there is none, as in a notebook."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = None
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            found = frame  # the outermost: what a notebook or a debugger runs is inside theirs
        frame = frame.f_back
    return found


def left_by_exception(script: FrameType) -> str:
    """The line of the script at which an exception left it; empty when it still runs, or came to its end.

    A frame that has ended stays at its last instruction: a return, or else what raised.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame is script:
            return ""
        frame = frame.f_back
    place, code = script.f_lasti, script.f_code.co_code
    if not 0 <= place < len(code) or dis.opname[code[place]].startswith("RETURN"):
        return ""
    return f"{os.path.basename(script.f_code.co_filename)}:{script.f_lineno}"
