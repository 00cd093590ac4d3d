"""What NCCL's logs say, as people read it: the facts as rows, then what went wrong with its evidence and remedies."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from lockstep.doctor import table
from lockstep.doctor.finding import Finding
from lockstep.doctor.nccl.read import Reading

_NARROWEST = 60


def lines(reading: Reading, width: int | None = None) -> Iterator[str]:
    """The whole report."""
    width = max(_NARROWEST, shutil.get_terminal_size((110, 24)).columns if width is None else width)
    facts = [finding for finding in reading.findings if not _is_message(finding)]
    messages = [finding for finding in reading.findings if _is_message(finding)]
    yield from table.lines(facts, width)
    for finding in messages:
        if finding.status != "ok":
            yield ""
            yield from _message(finding, width)
    notes = [finding for finding in messages if finding.status == "ok"]
    if notes:
        yield ""
        yield "Normal on many nodes:"
        for finding in notes:
            yield from textwrap.wrap(
                f"{finding.data['log']}:{finding.data['line']}: {finding.why}",
                width,
                initial_indent="  - ",
                subsequent_indent="    ",
            )
    yield ""
    yield table.summary(reading.findings)


def _is_message(finding: Finding) -> bool:
    return "evidence" in finding.data


def _message(finding: Finding, width: int) -> Iterator[str]:
    data = finding.data
    where = finding.what.removesuffix(data["evidence"]).removesuffix(": ")
    title = {"nccl first error": "First error", "nccl error": "Also", "nccl warning": "Warning"}
    yield f"{title.get(finding.check, finding.check)}: {where}"
    # Not wrapped: it is what people search for.
    yield f"  {data['evidence']}"
    yield from textwrap.wrap(finding.why, width, initial_indent="  means: ", subsequent_indent="         ")
    for number, remedy in enumerate(data["remedies"]):
        lead = "  do:    " if number == 0 else "         "
        yield from textwrap.wrap(
            remedy,
            width,
            initial_indent=lead,
            subsequent_indent="         ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    if data["source"]:
        yield f"  see:   {data['source']}"
