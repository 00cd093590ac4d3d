"""The failure screen: one box, whatever found the failure, and its layout in a limited number of lines.

The layout is the same on a terminal, where rich draws it (`show`), and in a file or a CI log, where it is plain text.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.rundir.code_frames import CodeFrame
from lockstep.rundir.printable import printable

WIDTH = 100
"""Columns in a file; on a terminal its own width counts."""
LINES = 30
"""Lines of a box, its frame included."""
_LABEL = 10
"""Columns of the labels."""
_POINTER = "❱"
_HEADLINE = 4
_LONGEST = 2000
"""Characters of a text that are laid out at all."""
# Lines around the innermost frame's own, frames, and lines of details: the first choice that fits is taken.
_CHOICES = ((2, 5, 99), (2, 4, 12), (1, 4, 10), (1, 3, 9), (1, 2, 8), (0, 2, 7), (0, 1, 6), (0, 1, 4), (0, 1, 2))

Segment = tuple[str, str]
"""A text and its style: "error", "label", "path", "here", "code", "dim" or none."""
Line = tuple[Segment, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A paragraph with a label before it."""

    label: str
    text: str
    code: str = ""
    """A line of the user's script, below the text."""
    rows: int = 5
    """Lines after which the text is cut."""


@dataclass(frozen=True, kw_only=True)
class FailureBox:
    """What is shown of one failure."""

    title: str
    """What shows the box, in the frame."""
    headline: str
    """The first line: which rank, which line of the script, what."""
    frames: tuple[CodeFrame, ...] = ()
    """The user's lines, innermost last."""
    raised_in: str = ""
    """Where in a library it was raised."""
    details: tuple[str, ...] = ()
    """Lines that are shown as they are."""
    places: tuple[Entry, ...] = ()
    """Where ranks are."""
    closing: tuple[Entry, ...] = ()
    """Cause, fix, the other ranks, logs."""


def plain(box: FailureBox, width: int = WIDTH) -> str:
    """The box as text."""
    lines = ["".join(text for text, _ in line).rstrip() for line in lay_out(box, width)]
    return "\n".join([rule(box.title, width), *lines, rule("", width)])


def rule(title: str, width: int = WIDTH) -> str:
    """The line above or below."""
    return (f"──── {printable(title)} " if title else "").ljust(width, "─")


def lay_out(box: FailureBox, width: int) -> list[Line]:
    """The lines inside the frame."""
    box = _from_here(box)
    head: list[Line] = [((text, "error"),) for text in _wrap(box.headline, width, _HEADLINE)]
    closing = [line for entry in box.closing for line in _entry(entry, width)]
    room = LINES - 2 - len(head) - len(closing)
    for around, frames, details in _CHOICES:
        body = _body(box, width, around, frames, details)
        if len(body) <= room:
            break
    return [*head, *body[: max(room, 0)], *closing]


def _from_here(box: FailureBox) -> FailureBox:
    """The box with paths below the working directory written relative to that."""
    try:
        here = os.getcwd() + os.sep
    except OSError:  # it is gone
        return box
    if len(here) < 3:
        return box
    return replace(
        box,
        headline=box.headline.replace(here, ""),
        details=tuple(text.replace(here, "") for text in box.details[: 2 * LINES + 1]) + box.details[2 * LINES + 1 :],
        places=tuple(replace(entry, text=entry.text.replace(here, "")) for entry in box.places),
        closing=tuple(replace(entry, text=entry.text.replace(here, "")) for entry in box.closing),
    )


def _body(box: FailureBox, width: int, around: int, frames: int, details: int) -> list[Line]:
    parts = [
        _code(box, width, around, frames),
        _details(box.details, width, details),
        _places(box.places, width, details),
    ]
    lines: list[Line] = []
    for part in parts:
        lines += [(), *part] if part else []
    return [*lines, ()] if box.closing else lines


# --- the user's code -----------------------------------------------------------------------------------------------


def _code(box: FailureBox, width: int, around: int, most: int) -> list[Line]:
    shown: list[CodeFrame | None] = list(box.frames)
    if len(shown) > most:
        # How the script came there, and the lines before the error.
        shown = [shown[0], None, *shown[len(shown) - most + 1 :]] if most > 2 else shown[-most:]
    lines: list[Line] = []
    for place, frame in enumerate(shown):
        if frame is None:
            lines.append((("  …", "dim"),))
        else:
            lines += _frame(frame, width, around if place == len(shown) - 1 else 0)
    if box.raised_in:
        lines.append(((_fit(f"raised in {box.raised_in}", width), "dim"),))
    return lines


def _frame(frame: CodeFrame, width: int, around: int) -> list[Line]:
    where = f" in {frame.function}" if frame.function not in ("", "<module>") else ""
    more = f" ({frame.repeats} more times)" if frame.repeats else ""
    site = _fit(frame.site, width)
    lines: list[Line] = [((site, "path"), (_fit(f"{where}{more}", max(0, width - len(site))), "dim"))]
    numbers = range(frame.first, frame.first + len(frame.source))
    source = zip(numbers, frame.source, strict=True)
    wanted = [(n, text.expandtabs(4)) for n, text in source if abs(n - frame.line) <= around]
    while wanted and not wanted[-1][1].strip() and wanted[-1][0] != frame.line:
        del wanted[-1]
    while wanted and not wanted[0][1].strip() and wanted[0][0] != frame.line:
        del wanted[0]
    dedented = textwrap.dedent("\n".join(text for _, text in wanted)).split("\n") if wanted else []
    digits = len(str(frame.line + around))
    for (number, _), text in zip(wanted, dedented, strict=True):
        here = number == frame.line
        mark = f"  {_POINTER if here else ' '} {number:>{digits}}  "
        lines.append(((mark, "here" if here else "dim"), (_fit(text, width - len(mark)), "code" if here else "dim")))
    return lines


# --- texts ---------------------------------------------------------------------------------------------------------


def _details(details: Sequence[str], width: int, most: int) -> list[Line]:
    rows: list[str] = []
    for text in details[: 2 * LINES]:
        rows += _rows(text, width)
    left = len(details) - 2 * LINES
    if len(rows) > most or left > 0:
        kept = min(max(most - 1, 1), len(rows))
        count = max(left, 0) + len(rows) - kept
        rows = [*rows[:kept], f"… {count:,} more line{'' if count == 1 else 's'}"]
    return [((row, ""),) for row in rows]


def _rows(text: str, width: int) -> list[str]:
    """A line as it is; one that is too long in at most three, the second and third indented as the first."""
    text = printable(text[:_LONGEST]).expandtabs(4).rstrip()
    if len(text) <= width:
        return [text]
    indent = " " * min(len(text) - len(text.lstrip()) + 2, width // 2)
    return _cut(
        textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False), 3, width
    )


def _places(places: Sequence[Entry], width: int, most: int) -> list[Line]:
    lines = [line for entry in places for line in _entry(entry, width)]
    room = max(most, 6)
    return lines if len(lines) <= room else [*lines[: room - 1], ((" " * _LABEL + "…", "dim"),)]


def _entry(entry: Entry, width: int) -> list[Line]:
    room = max(20, width - _LABEL)
    rows: list[str] = []
    for paragraph in entry.text.splitlines()[:LINES]:
        rows += _wrap(paragraph, room, entry.rows)
    lines: list[Line] = []
    for place, row in enumerate(_cut(rows, entry.rows, room)):
        lines.append(((f"{entry.label if place == 0 else '':{_LABEL}}", "label"), (row, "")))
    if entry.code:
        mark = f"{'':{_LABEL}}  {_POINTER} "
        lines.append(((mark, "here"), (_fit(entry.code, width - len(mark)), "code")))
    return lines


def _wrap(text: str, width: int, most: int) -> list[str]:
    text = printable(" ".join(text[:_LONGEST].split()))
    return _cut(textwrap.wrap(text, max(width, 10), break_on_hyphens=False, break_long_words=False), most, width)


def _cut(rows: list[str], most: int, width: int) -> list[str]:
    return rows if len(rows) <= most else [*rows[: most - 1], f"{rows[most - 1][: width - 2]} …"]


def _fit(text: str, width: int) -> str:
    text = printable(text.replace("\n", " "))
    return text if len(text) <= width else f"{text[: max(0, width - 2)]} …"
