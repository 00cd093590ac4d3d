"""From logs to findings: every log that can be read is, and of the others is said why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.doctor.finding import Finding, Status, exit_code
from lockstep.doctor.nccl import findings as log_findings
from lockstep.doctor.nccl import knowledge
from lockstep.doctor.nccl.log_parser import LogParser
from lockstep.doctor.nccl.log_summary import LogSummary
from lockstep.doctor.nccl.message import HINTS
from lockstep.doctor.nccl.reader import Log, Progress, UnreadableLog, logs_of

Watch = Callable[[Log], Progress]
"""Is called with each log before it is read, and gives what is told of the progress."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the logs said."""

    logs: tuple[str, ...]
    """Those that were read."""
    summary: LogSummary
    """All of it together."""
    findings: list[Finding]
    """The same, as findings; what could not be read is among them."""


def read(named: Sequence[str], watch: Watch | None = None, logs: Sequence[Log] = ()) -> Reading:
    """Read logs, those that are ``named`` and the given ones, and put their ranks' stories together."""
    parser = LogParser(knowledge.load())
    findings: list[Finding] = []
    names: list[str] = []
    empty: list[str] = []
    wanted = list(logs)
    for word in named:
        try:
            wanted += logs_of(word)
        except (UnreadableLog, OSError) as error:
            findings.append(_unreadable(str(error)))
    for log in wanted:
        try:
            _add(parser, log, watch(log) if watch is not None else None)
            (empty if log.size() == 0 else names).append(log.name)
        except UnreadableLog as error:
            # A folder may hold other things than logs.
            findings.append(_unreadable(str(error), "error" if log.asked_for else "skipped"))
    summary = parser.summarize()
    # Of a folder some files may well be empty: a rank that printed nothing.
    if empty and not names:
        findings.append(Finding(check="log", status="warning", what=f"{', '.join(empty[:6])}: nothing in it"))
    elif (names or named) and not summary.lines and not summary.problems and not exit_code(findings):
        findings.append(
            Finding(
                check="log",
                status="warning",
                what=f"no line of NCCL's in {', '.join((names or named)[:6])}"
                + (" and others" if len(names) > 6 else ""),
                why="NCCL writes only when it is told to, and a job on gloo (CPU) does not use it",
                fix="Start the job with NCCL_DEBUG=INFO, or from here: lockstep doctor nccl --run -- train.py",
            )
        )
    return Reading(logs=tuple(names), summary=summary, findings=[*findings, *log_findings.findings(summary)])


def _add(parser: LogParser, log: Log, progress: Progress | None) -> None:
    for number, raw in log.lines(progress, HINTS):
        parser.add(log.name, number, raw)


def _unreadable(text: str, status: Status = "error") -> Finding:
    return Finding(check="log", status=status, what=text)
