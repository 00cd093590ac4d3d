"""When an exception ends this rank, the others are notified before it is gone, instead of waiting for it in vain."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from lockstep.blackbox import read
from lockstep.errors import TopologyError, first_line
from lockstep.host import script_exit
from lockstep.process_group import failure_screen
from lockstep.process_group.group import Group
from lockstep.rundir import crash_report, error_file, rank_log
from lockstep.rundir.crash_report import Advice

_STORE_ANSWERS = 10.0
"""Seconds that a rank that leaves waits for the job's store."""
_LEAVE_FIRST = 3.0
"""Seconds for which a rank lets the one whose failure it follows leave before it."""


class PeerNotifier:
    """An excepthook that notifies the other ranks; installed while the rank is in a job."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._before: Any = None
        self._unraisable: Any = None
        self._script: FrameType | None = None
        """The frame of the script, which remembers how it was left."""
        self.message = ""
        """The first line of the exception that ended this rank; empty while there is none."""
        self.note = ""
        """What is known of an end whose exit code is not: by SystemExit, or after an atexit callback that raised."""

    def install(self, group: Group) -> None:
        """From now on, notify the others. Before the process group is made: torch puts its own hook around ours."""
        self._group = group
        self._before = sys.excepthook
        sys.excepthook = self
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        crash_report.add_adviser(self._advise)
        self._script = script_exit.script_frame()

    def uninstall(self) -> None:
        """The rank leaves in good order."""
        self._group = self._script = None
        self.message = self.note = ""
        crash_report.remove_adviser(self._advise)
        if sys.excepthook is self:
            sys.excepthook = self._before
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._unraisable

    def report_exit(self, directory: Path | None, code: str = "") -> None:
        """Python calls no hook for ``sys.exit``: where one was noted, by the launcher's shim or by us, report it."""
        if self._group is not None and code and not self.message:
            self.message = f"it left with sys.exit({code})"
            _end(self._group, self.message)
        if self._group is None or self.message or directory is None:
            return
        if not self.note and self._script is not None and (site := script_exit.left_by_exception(self._script)):
            # An excepthook was called for any other exception. Its code is known to nobody before the process ends.
            self.note = f"SystemExit at {site}"
            error_file.write("SystemExit", f"SystemExit, which left the script at {site}. The exit code is its code.")
        own = [
            said for said in crash_report.read_all(directory) if said.pid == os.getpid() and said.kind == "SystemExit"
        ]
        if own and not own[0].follows:
            self.message = f"it left with sys.exit({own[0].message}), at {own[0].line}"
            _end(self._group, self.message)

    def _on_unraisable(self, raised: Any) -> None:
        """Python prints what an atexit callback raises, and exits as if nothing had happened."""
        if "atexit" in (raised.err_msg or ""):
            self.note = f"an atexit callback raised {raised.exc_type.__name__}: {first_line(raised.exc_value or '')}"
        self._unraisable(raised)

    def _advise(self, error: BaseException) -> Advice | None:
        """For the crash report: which ranks a broken connection led to."""
        return self._group.advise_on_lost_peers(error) if self._group is not None else None

    def __call__(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        """As an excepthook is called."""
        text = first_line(crash_report.message_of(value))
        self.message = f"{kind.__name__}: {text}" if text else kind.__name__
        group = self._group
        if group is not None and not group.is_consequence(value):
            _end(group, self.message, crash_report.format_traceback(kind, value, trace))
        if group is None or rank_log.taken() is not None or not failure_screen.show(group, kind, value, trace):
            self._before(kind, value, trace)
            _add_advice(str(crash_report.advice_on(value)))
        elif self._before is not sys.__excepthook__:
            self._before(kind, value, trace)  # the script's own: it may report elsewhere
        if group is not None:
            _let_leave_first(group)


def _add_advice(text: str) -> None:
    """Below the traceback, wherever that went."""
    log = rank_log.taken()
    if text and (log is None or not rank_log.append(log, f"\n{text}\n")):
        print(f"\n{text}", file=sys.stderr)


def _end(group: Group, what: str, details: str = "") -> None:
    """Notify the others, as far as the store can be reached; the user's own error is shown in any case.

    Behind a network that is cut, torch waits for an answer of the store without a limit.
    """

    def end() -> None:
        with contextlib.suppress(RuntimeError, TopologyError):
            group.abort(what, leaving=True, details=details)

    thread = threading.Thread(target=end, name="lockstep-farewell", daemon=True)
    thread.start()
    thread.join(_STORE_ANSWERS)
    group.store_lost = thread.is_alive()


def _let_leave_first(group: Group) -> None:
    """Wait a moment until a rank of this node that has failed is gone: torchrun takes who ends first for the cause.

    Python takes about a second to shut down with torch loaded, on this rank as on that one.
    """
    cause, deadline = group.abort_reason, time.monotonic() + _LEAVE_FIRST
    if cause is None or not cause.leaving or cause.rank == group.rank or group.boxes is None:
        return
    while time.monotonic() < deadline:
        boxes = [box for box in read.read_all(group.boxes) if box.rank == cause.rank]
        if not any(box.alive for box in boxes):
            return
        time.sleep(0.02)
