"""Findings as a table or as lines."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from lockstep.doctor.finding import Finding, Status
from lockstep.rundir.printable import printable

_MARKS: dict[Status, str] = {"ok": "ok", "warning": "WARNING", "error": "ERROR", "skipped": "--"}
_COUNTED: dict[Status, str] = {"error": "error", "warning": "warning", "ok": "ok", "skipped": "skipped"}
_STYLES: dict[Status, str] = {"ok": "green", "warning": "bold yellow", "error": "bold red", "skipped": "dim"}
_ORDER: tuple[Status, ...] = ("error", "warning", "ok", "skipped")
_NARROWEST = 60


def lines(findings: Sequence[Finding], width: int | None = None) -> Iterator[str]:
    """One row for each finding, errors and warnings first; why and what to do below those that need it."""
    width = max(_NARROWEST, shutil.get_terminal_size((120, 24)).columns if width is None else width)
    names = max((len(finding.check) for finding in findings), default=0)
    for finding in gravest_first(findings):
        start = f"{_MARKS[finding.status]:<8} {finding.check:<{names}}  "
        yield from _wrapped(finding.what, width, start) or [start.rstrip()]
        for label, text in (("why", finding.why), ("fix", finding.fix)):
            if text and finding.status in ("warning", "error"):
                lead = " " * len(start) + f"{label}: "
                # Never broken inside a command: it is to be copied.
                yield from [lead + text] if label == "fix" else _wrapped(text, width, lead)


def gravest_first(findings: Sequence[Finding]) -> list[Finding]:
    """Errors, warnings, what is fine, what was skipped; each in the order of the checks."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.status))


def show(findings: Sequence[Finding]) -> None:
    """Print them: a table on a terminal, lines elsewhere; and how many there are of each."""
    if not sys.stdout.isatty():
        print(printable("\n".join([*lines(findings), summary(findings)])))
        return
    from rich.console import Console  # loaded here: a file or a pipe does without
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=False, header_style="bold", border_style="dim")
    for heading in ("", "Check", "Result"):
        table.add_column(heading, overflow="fold")
    for finding in gravest_first(findings):
        style = _STYLES[finding.status]
        text = Text(printable(finding.what))
        if finding.status in ("warning", "error"):
            if finding.why:
                text.append(f"\n{printable(finding.why)}", style="dim")
            if finding.fix:
                text.append(f"\nfix: {printable(finding.fix)}", style="bold")
        table.add_row(Text(_MARKS[finding.status], style=style), Text(printable(finding.check)), text)
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(summary(findings)))


def _wrapped(text: str, width: int, start: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def summary(findings: Sequence[Finding]) -> str:
    """How many of each, in one line."""
    words = []
    for status, name in _COUNTED.items():
        count = sum(finding.status == status for finding in findings)
        if count:
            words.append(f"{count} {name}{'s' if count > 1 and status in ('error', 'warning') else ''}")
    return ", ".join(words) or "no checks were run"
