"""A box as one of the process's own streams shows it: drawn by rich on a terminal, plain text elsewhere."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from lockstep.config import env
from lockstep.terminal.failure_box import WIDTH, FailureBox, lay_out, plain

_WIDEST = 120
"""Columns of a box on a wide terminal: longer lines are hard to read."""
_NARROWEST = 40
_STYLES = {
    "error": "bold red",
    "label": "bold",
    "path": "cyan",
    "here": "bold red",
    "code": "bold",
    "dim": "dim",
    "": "",
}
_ASCII = str.maketrans({"─": "-", "❱": ">", "…": "..."})


def render(box: FailureBox, descriptor: int = 2) -> str:
    """The text of a box for what this descriptor leads to."""
    environ = env.snapshot()
    columns = _columns(descriptor)
    if columns is None or environ.get("TERM") == "dumb":
        return encodable(plain(box))
    if not _shows("─❱…╭"):
        return encodable(plain(box, min(columns, WIDTH)))
    return draw(box, max(_NARROWEST, min(columns, _WIDEST)), coloured=not environ.get("NO_COLOR"))


def draw(box: FailureBox, width: int, *, coloured: bool = True) -> str:
    """The box as rich draws it, with the sequences of a terminal that knows colours."""
    from io import StringIO  # loaded when a job has failed, and there is a terminal

    from rich.console import Console

    console = Console(
        file=StringIO(), width=width, force_terminal=True, no_color=not coloured, highlight=False, legacy_windows=False
    )
    with console.capture() as captured:
        console.print(panel(box, width))
    return captured.get().rstrip("\n")


def panel(box: FailureBox, width: int) -> object:
    """The box as something that rich prints."""
    from rich.box import ROUNDED
    from rich.panel import Panel
    from rich.text import Text

    lines = [Text.assemble(*((text, _STYLES[style]) for text, style in line)) for line in lay_out(box, width - 4)]
    text = Text("\n", overflow="fold").join(lines)
    title = Text(box.title, style="bold red")
    return Panel(text, title=title, title_align="left", border_style="red", box=ROUNDED, width=width)


def encodable(text: str) -> str:
    """The text with its signs replaced where the encoding of stderr has none for them."""
    return text if _shows("─❱…") else text.translate(_ASCII)


def _shows(signs: str) -> bool:
    try:
        signs.encode(getattr(sys.stderr, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _columns(descriptor: int) -> int | None:
    """How wide the terminal is; None where there is none."""
    with suppress(OSError, ValueError):
        if os.isatty(descriptor):
            return os.get_terminal_size(descriptor).columns or 80
    return None
