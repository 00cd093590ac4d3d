"""The box of a rank that reported its exception: its crash report, as the launcher or the rank itself shows it."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import first_line
from lockstep.rundir.crash_report import Advice, CrashReport
from lockstep.rundir.format_ranks import name_ranks
from lockstep.terminal.failure_box import Entry, FailureBox

_LIKELY = "Likely cause: "
_ABOUT_OTHERS = ("DistributedOperationException", "PeerFailure")
"""What a rank raises that may only have noticed another rank's mistake."""
_RANGES = 8
_BEGIN, _END = 12, 3
"""Lines of a long text that are shown."""


def headline(report: CrashReport, ranks: Sequence[int] = ()) -> str:
    """The first line: which rank, which line of the script, what."""
    site = report.line.removesuffix(" in <module>")
    if report.lead:
        # The line is where this rank stopped: it says nothing of a rank that is named as the cause.
        of_another = report.lead.startswith("Rank") and not report.lead.startswith(f"Rank {report.rank} ")
        known = not site or site.partition(" in ")[0] in report.lead or report.kind in _ABOUT_OTHERS or of_another
        return report.lead if known else f"{report.lead.rstrip('.')}, at {site}."
    who = name_ranks(ranks or (report.rank,), _RANGES)
    who = f"{who[:1].upper()}{who[1:]}"
    if report.node is not None and len(ranks) < 2:
        who += f" on node {report.node} ({report.host})"
    where = f" at {site}" if site else ""
    if report.kind == "SystemExit":
        if report.message.isdecimal():
            return f"{who} exited with code {report.message}, by sys.exit(){where}."
        return f"{who} exited with code 1, by sys.exit(){where}: {first_line(report.message)}"
    said = first_line(report.message)
    return f"{who} raised {report.kind}{where}{f': {said}' if said else '.'}"


def of_report(
    report: CrashReport, *, title: str, ranks: Sequence[int] = (), others: str = "", log: str = ""
) -> FailureBox:
    """The whole box. ``ranks`` are those that failed alike, ``others`` what became of the rest."""
    places = []
    if report.lead and report.kind in _ABOUT_OTHERS:
        site = report.line.removesuffix(" in <module>")
        places.append(Entry(label="Seen by", text=f"rank {report.rank}{f', at {site}' if site else ''}"))
    if report.kind == "OutOfMemory" and report.message.strip():  # a search has ended; what came of it is its last line
        places.append(Entry(label="Result", text=report.message.strip().splitlines()[-1]))
    advice = Advice(cause=report.cause, fix=report.fix)
    return FailureBox(
        title=title,
        headline=headline(report, ranks),
        frames=report.frames,
        raised_in=report.raised_in,
        details=tuple(_details(report)),
        places=tuple(places),
        closing=closing(advice, others=others, log=log),
    )


def of_advice(title: str, advice: Advice) -> FailureBox:
    """The box of what others know of a rank that left no report."""
    return FailureBox(
        title=title, headline=advice.lead, details=tuple(advice.details.splitlines()), closing=closing(advice)
    )


def closing(advice: Advice, *, others: str = "", log: str = "", holds: str = "full traceback") -> tuple[Entry, ...]:
    """What stands at the end of every box. ``log`` is the file of the rank that failed, among those of the others."""
    folder, _, name = log.rpartition("/")
    logs = f"{folder} ({holds}: {name})" if folder and name.endswith(".err") else log
    entries = (
        Entry(label="Cause", text=advice.cause),
        Entry(label="Fix", text=advice.fix, rows=7),
        Entry(label="Others", text=others, rows=2),
        Entry(label="Logs", text=logs, rows=3),
    )
    return tuple(entry for entry in entries if entry.text)


def _details(report: CrashReport) -> list[str]:
    """What the exception's text has beyond its first line and what stands elsewhere in the box."""
    if report.kind == "SystemExit":
        return []
    text = report.message.partition(f"\n{_LIKELY}")[0] if report.cause else report.message
    lines = [line.rstrip() for line in text.strip().splitlines()]
    if not report.lead:
        lines = lines[1:]
    elif report.kind in _ABOUT_OTHERS:
        lines = [line for line in lines if line.strip() != report.lead]
    elif lines:
        lines[0] = f"{report.kind}: {lines[0]}"
    if report.kind not in _ABOUT_OTHERS and len(lines) > _BEGIN + _END + 1:
        # What a text comes to stands at its end.
        lines = [*lines[:_BEGIN], f"… {len(lines) - _BEGIN - _END:,} more lines", *lines[-_END:]]
    causes = () if report.kind in _ABOUT_OTHERS else report.causes
    return [*_trimmed(lines), *report.details.splitlines(), *(f"from {cause}" for cause in causes)]


def _trimmed(lines: list[str]) -> list[str]:
    """Without empty lines at the ends, and without two in a row."""
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):
            kept.append(line)
    return kept[:-1] if kept and not kept[-1] else kept
