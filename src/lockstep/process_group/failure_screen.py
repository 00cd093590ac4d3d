"""A rank that another launcher started shows its own failure: the box once for the job, the whole traceback in its log.

Under ``lockstep launch`` the launcher does it, which sees how all ranks ended.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from lockstep.config import env
from lockstep.config.traceback import read_traceback
from lockstep.errors import ConfigError, TopologyError
from lockstep.job_store.signed_store import from_text
from lockstep.process_group.group import Group
from lockstep.rundir import crash_report, rank_log
from lockstep.rundir.code_frames import shorten
from lockstep.rundir.layout import RunDirectory
from lockstep.rundir.printable import printable
from lockstep.terminal import show as terminal
from lockstep.terminal.rank_failure import headline, of_report
from lockstep.topology.standard_streams import print_error

_TITLE = "lockstep: the job failed"
_ASKING = 2.0
"""Seconds in which the job's store answers who shows the failure."""


def show(group: Group, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> bool:
    """Show why this rank ends, unless another one shows the same; False where that cannot be done."""
    if group.world_size == 1 or group.monitor.boxes is None:
        return False
    said = crash_report.of_this_process(kind, value, trace)
    said = replace(said, rank=group.rank)
    log = RunDirectory(path=group.monitor.boxes.parent).log(group.rank, "err")
    advice = crash_report.advice_on(value)
    whole = crash_report.format_traceback(kind, value, trace)
    if not rank_log.append(log, f"{whole}\n{advice}\n" if str(advice) else whole):
        return False
    reason = group.abort_reason
    if reason is not None and reason.leaving and reason.rank != group.rank and said.follows:
        return True  # that rank shows it
    mine = f"{said.kind} {said.line} {said.lead}"
    first = _claim(group, mine)
    if first not in ("", mine):
        print_error(printable(f"{headline(said)} (traceback: {shorten(str(log))})"))
    elif first == "":
        with suppress(ConfigError):
            if read_traceback(env.snapshot()) == "full":
                print_error(printable(whole.rstrip()))
        print_error(terminal.render(of_report(said, title=_TITLE, log=shorten(str(log)))))
    return True


def _claim(group: Group, mine: str) -> str:
    """What the rank shows that was first to claim it; empty for this rank, also where the store does not answer."""
    answer: list[str] = []

    def ask() -> None:
        with suppress(RuntimeError, TopologyError):
            token = f"{group.rank} {os.getpid()} {mine}"
            found = group.store.clone().claim(f"failure_screen/{group.generation}", token, from_text)
            answer.append("" if found == token else found.split(" ", 2)[2])

    thread = threading.Thread(target=ask, name="lockstep-failure-screen", daemon=True)
    thread.start()
    thread.join(_ASKING)
    return answer[0] if answer else ""
