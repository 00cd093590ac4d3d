"""What ended a rank that torchrun started, where torchrun's own summary looks for it: TORCHELASTIC_ERROR_FILE.

The form is that of torch's ``ErrorHandler``. What a script that uses torch's ``record`` has written there stays.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback as tracebacks
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from lockstep.config import env
from lockstep.config.traceback import read_traceback
from lockstep.errors import ConfigError, first_line
from lockstep.host.atomic_file import replacing
from lockstep.rundir import crash_report

_LATER = 2
"""Seconds by which a consequence is dated later: for torchrun the earliest is the root cause, in whole seconds."""


def write(message: str, callstack: str, *, follows: bool = False) -> None:
    """Leave what ended this rank, unless something is there; nothing for a rank that torchrun did not start.

    ``follows`` when another rank's failure led to it. A disk that fails must not hide the error: never raises.
    """
    path = env.error_file(env.snapshot())
    if path is None or os.path.exists(path):
        return
    about = {"py_callstack": callstack, "timestamp": str(int(time.time()) + (_LATER if follows else 0))}
    with suppress(OSError, ValueError), replacing(path) as draft, open(draft, "w") as file:
        json.dump({"message": {"message": message, "extraInfo": about}}, file)


def _callstack(report: crash_report.CrashReport, value: BaseException, trace: TracebackType | None) -> str:
    """What torchrun's last block shows: the user's own frames and what is known; of a consequence, a line or two."""
    advice = crash_report.Advice(lead=report.lead, details=report.details, cause=report.cause, fix=report.fix)
    if report.follows:
        return f"{report.kind}: {first_line(report.message)}\n{advice}".rstrip()
    with suppress(ConfigError):
        if read_traceback(env.snapshot()) == "full":
            return report.traceback.rstrip()
    text = crash_report.format_traceback(type(value), value, trace, short=True).rstrip()
    explained = "Likely cause: " in report.message or "Fix: " in report.message
    lines = str(advice) if not explained else report.lead if report.lead not in report.message else ""
    return f"{text}\n{lines}".rstrip()


class ErrorFile:
    """Writes it for an exception that nobody caught, and for ``sys.exit`` with another code than 0."""

    def __init__(self) -> None:
        self._rank: int | None = None
        """Which rank this is; None while nothing is to be written."""
        self._hook: Any = None
        self._exit: Any = None
        self._left: tuple[str, str] | None = None
        """The code of the last ``sys.exit``, and its stack. It is written at the end: a script can catch SystemExit."""

    def install(self, rank: int) -> None:
        """From now on. After the process group is made: torch's hook is called by ours."""
        if env.error_file(env.snapshot()) is None:
            return
        self._rank, self._left = rank, None
        self._hook, sys.excepthook = sys.excepthook, self._on_exception
        self._exit, sys.exit = sys.exit, self._on_exit

    def uninstall(self) -> str:
        """The rank leaves the job, or Python ends: by ``sys.exit`` maybe, for which it calls no hook; its code."""
        code = ""
        if self._left is not None and self._rank is not None:
            code, stack = self._left
            write(f"SystemExit: {code}", f"{stack}SystemExit: {code}")
        self.forget()
        return code

    def forget(self) -> None:
        """Write nothing from now on."""
        self._rank = self._left = None
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook
        if sys.exit == self._on_exit:
            sys.exit = self._exit

    def _on_exception(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if self._rank is not None:
            report = crash_report.of_this_process(kind, value, trace)
            write(f"{report.kind}: {report.message}", _callstack(report, value, trace), follows=report.follows)
        self._hook(kind, value, trace)

    def _on_exit(self, status: Any = None, /) -> NoReturn:
        if status in (None, 0):
            self._left = None
        else:
            frame = sys._getframe(1)
            self._left = crash_report.message_of(SystemExit(status)), "".join(tracebacks.format_stack(frame))
        self._exit(status)
        raise AssertionError("sys.exit returned")
