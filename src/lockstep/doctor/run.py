"""Running checks so that none of them can hang or break the doctor: each in a process of its own, with a time limit.

A process, not a thread: a driver that keeps the interpreter's lock, or a file system that does not answer and cannot
even be killed, is left behind without taking the doctor along. All run at once: the longest limit is that of all.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from lockstep.doctor.checks import CHECKS, DoctorCheck
from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding

OnResult = Callable[[DoctorCheck, list[Finding]], None]
"""Is called with each check as soon as it has an answer."""


def run_checks(
    context: DoctorContext, checks: Sequence[DoctorCheck] = CHECKS, on_result: OnResult | None = None
) -> list[Finding]:
    """What each check finds, in the order of the list. Never takes longer than the longest limit, and a second."""
    # A fork begins at once and needs nothing imported again. This process has no threads yet, and has not met a driver.
    fork: Any = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[DoctorCheck, Any, float]] = {}
    for check in checks:
        reader, writer = fork.Pipe(duplex=False)
        process = fork.Process(target=_answer, args=(writer, check, context), daemon=True)
        process.start()
        writer.close()
        running[reader] = (check, process, time.monotonic() + check.limit)
    found: dict[str, list[Finding]] = {}
    while running:
        patience = max(0.0, min(deadline for _, _, deadline in running.values()) - time.monotonic())
        for reader in wait(list(running), patience):
            assert isinstance(reader, Connection)
            check, process, _ = running.pop(reader)
            found[check.name] = _received(reader, check, process)
            _send_result(on_result, check, found)
        for reader, (check, process, deadline) in list(running.items()):
            if time.monotonic() >= deadline:
                del running[reader]
                found[check.name] = [_given_up(check)]
                _end(reader, process)
                _send_result(on_result, check, found)
    return [finding for check in checks for finding in found[check.name]]


def run_check(check: DoctorCheck, context: DoctorContext) -> list[Finding]:
    """Run one check here and now; one that breaks is a finding too."""
    module, _, function = check.place.partition(":")
    try:
        answer = getattr(importlib.import_module(f"lockstep.doctor.checks.{module}"), function)(context)
    except Exception as error:
        return [_broken(check, f"{type(error).__name__}: {error}")]
    return [answer] if isinstance(answer, Finding) else list(answer)


def _send_result(on_result: OnResult | None, check: DoctorCheck, found: dict[str, list[Finding]]) -> None:
    if on_result is not None:
        on_result(check, found[check.name])


def _answer(writer: Connection, check: DoctorCheck, context: DoctorContext) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the doctor, which ends its checks
    writer.send([finding.plain() for finding in run_check(check, context)])
    writer.close()


def _received(reader: Connection, check: DoctorCheck, process: Any) -> list[Finding]:
    try:
        return [Finding.of(plain) for plain in reader.recv()]
    except EOFError:
        process.join(1.0)
        code = process.exitcode
        ending = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return [_broken(check, f"its process ended with {ending}")]
    finally:
        _end(reader, process)


def _end(reader: Connection, process: Any) -> None:
    reader.close()
    process.join(0.2)
    if process.is_alive():
        process.kill()
        process.join(0.2)  # not longer: one that waits for a dead disk cannot be killed
    with suppress(ValueError):
        process.close()


def _broken(check: DoctorCheck, how: str) -> Finding:
    return Finding(
        check=check.name,
        status="warning",
        what=f"could not be looked at: {how}",
        why="the doctor itself failed here, so this is not known to be well",
    )


def _given_up(check: DoctorCheck) -> Finding:
    return Finding(
        check=check.name,
        status="error",
        what=f"no answer within {check.limit:g} s",
        why="whatever does not answer the doctor will keep a job waiting too",
    )


def problems(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Those that need doing something about."""
    return (finding for finding in findings if finding.status in ("warning", "error"))
