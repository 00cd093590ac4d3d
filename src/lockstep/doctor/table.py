"""Findings as people read them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from lockstep.doctor.finding import Finding, Status

_MARKS: dict[Status, str] = {"ok": "ok", "warning": "WARNING", "error": "ERROR", "skipped": "--"}
_COUNTED: dict[Status, str] = {"error": "error", "warning": "warning", "ok": "ok", "skipped": "skipped"}
_NARROWEST = 60


def lines(findings: Sequence[Finding], width: int | None = None) -> Iterator[str]:
    """One row for each finding; why and what to do below those that need it."""
    width = max(_NARROWEST, shutil.get_terminal_size((120, 24)).columns if width is None else width)
    names = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        start = f"{_MARKS[finding.status]:<8} {finding.check:<{names}}  "
        yield from _wrapped(finding.what, width, start) or [start.rstrip()]
        for label, text in (("why", finding.why), ("fix", finding.fix)):
            if text and finding.status in ("warning", "error"):
                lead = " " * len(start) + f"{label}: "
                # Never broken inside a command: it is to be copied.
                yield from [lead + text] if label == "fix" else _wrapped(text, width, lead)


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
    return ", ".join(words) or "nothing was looked at"
