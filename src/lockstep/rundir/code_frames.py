"""The user's own lines on the way to an error, with the source around each, as they were when it was raised.

They are taken in the process that fails: the launcher may run on another node, or the file may be gone when it looks.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from types import TracebackType
from typing import Any

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SHIM = os.path.join(_OURS, "launch", "worker.py")
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_AROUND = 2
"""Lines of source that are kept before and after the one that was run."""
_LONGEST = 300
"""Characters of a line that are kept."""
_LARGEST = 4 << 20
"""Bytes of a file that is read for its lines."""
_FIRST, _LAST = 4, 12
"""Frames that are kept of a deep stack, at its beginning and at its end."""


@dataclass(frozen=True, kw_only=True)
class CodeFrame:
    """One line of a stack."""

    file: str
    """Relative to the working directory where it lies below that."""
    line: int
    function: str
    first: int = 0
    """The number of the first line of ``source``."""
    source: tuple[str, ...] = ()
    """The line and those around it; empty where the file cannot be read."""
    repeats: int = 0
    """How often it follows itself in the stack, as in a recursion."""

    @property
    def site(self) -> str:
        """``train.py:12``."""
        return f"{self.file}:{self.line}"

    @classmethod
    def from_dict(cls, fields: Any) -> CodeFrame:
        """From JSON; ValueError for anything that is not a frame."""
        try:
            frame = cls(**{**fields, "source": tuple(fields["source"])})
        except (TypeError, KeyError):
            raise ValueError("not a frame") from None
        texts, numbers = (frame.file, frame.function, *frame.source), (frame.line, frame.first, frame.repeats)
        if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
            raise ValueError("not a frame")
        return frame


def frames_of(value: BaseException | None, trace: TracebackType | None) -> tuple[tuple[CodeFrame, ...], str]:
    """The user's frames, innermost last, and where in another library the error was raised; empty in the user's code.

    Where no frame is the user's, those of libraries stand in for them.
    """
    every = [(name, line, function) for name, line, function in _walk(trace) if not is_machinery(name)]
    users = [item for item in every if is_users(item[0])]
    chosen = users or [item for item in every if not item[0].startswith(_OURS)] or every
    deep = [(item, len(list(same)) - 1) for item, same in groupby(chosen)]
    if len(deep) > _FIRST + _LAST:
        deep = deep[:_FIRST] + deep[-_LAST:]
    frames = [_frame(*item, repeats) for item, repeats in deep]
    if isinstance(value, SyntaxError) and value.filename and value.lineno:
        frames.append(_of_syntax_error(value))
    last = every[-1] if every else None
    inside = users and last is not None and last != users[-1] and not last[0].startswith(_OURS)
    where = f"{_in_package(last[0])}:{last[1]} in {last[2]}" if inside and last is not None else ""
    return tuple(frames), where


def is_machinery(filename: str) -> bool:
    """What stands between the interpreter and the user's script, or between an import and what it imports."""
    return (
        filename.startswith(("<frozen importlib", "<frozen runpy"))
        or filename == f"{_STANDARD}runpy.py"
        or filename == _SHIM
    )


def is_users(filename: str) -> bool:
    """Whether a file is neither ours, nor Python's, nor an installed package's."""
    if filename.startswith("<"):
        return False
    with suppress(OSError):  # the working directory is gone
        filename = os.path.abspath(filename)
    return not filename.startswith((_OURS, _STANDARD)) and not any(part in filename for part in _PACKAGES)


def shorten(filename: str) -> str:
    """Relative to the working directory where the file lies below it."""
    with suppress(OSError):
        return filename.removeprefix(os.getcwd() + os.sep)
    return filename


def _walk(trace: TracebackType | None) -> Iterator[tuple[str, int, str]]:
    while trace is not None:
        code = trace.tb_frame.f_code
        yield code.co_filename, trace.tb_lineno or 0, code.co_name
        trace = trace.tb_next


def _frame(filename: str, line: int, function: str, repeats: int = 0) -> CodeFrame:
    lines = _read(filename)
    frame = CodeFrame(file=shorten(filename), line=line, function=function, repeats=repeats)
    return replace(frame, **_around(lines, line)) if 0 < line <= len(lines) else frame


def _of_syntax_error(error: SyntaxError) -> CodeFrame:
    line = error.lineno or 0
    frame = _frame(str(error.filename), line, "")
    if not frame.source and isinstance(error.text, str):
        frame = replace(frame, first=line, source=(error.text.rstrip("\n")[:_LONGEST],))
    return frame


def _around(lines: list[str], line: int) -> dict[str, Any]:
    first = max(1, line - _AROUND)
    return {"first": first, "source": tuple(text.rstrip()[:_LONGEST] for text in lines[first - 1 : line + _AROUND])}


def _read(filename: str) -> list[str]:
    """The lines of a file as it is now; of one that is not text in its own encoding, what can be read."""
    try:
        if os.stat(filename).st_size > _LARGEST or not os.path.isfile(filename):
            return []
    except (OSError, ValueError):
        return linecache.getlines(filename)  # inside an archive, maybe, or typed into a notebook
    linecache.checkcache(filename)
    if lines := linecache.getlines(filename):
        return lines
    with suppress(OSError), open(filename, encoding="utf-8", errors="replace") as file:
        return file.readlines()
    return []


def _in_package(filename: str) -> str:
    """A file of an installed package without the folder of all packages."""
    for part in _PACKAGES:
        if part in filename:
            return filename.rpartition(part)[2]
    return filename.removeprefix(_STANDARD)
