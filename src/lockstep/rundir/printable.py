"""Text that others wrote, as it may be shown on a terminal: log lines, errors, names of files and hosts, stacks.

A terminal acts on control characters: it moves the cursor, retitles or resizes the window, puts text into the
clipboard or into its answer to the shell. Whoever can write into a run, or name a file in it, is not to do that on the
screen of whoever looks at it.
"""

from __future__ import annotations

import re

# C0 without tab and line feed, DEL, C1, separators of lines, marks that turn the direction of text, halves of pairs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def printable(text: str) -> str:
    """The text with every control character written out (``\\x1b``); lines and tabs stay."""
    return _CONTROL.sub(_written_out, text)


def uncoloured(text: str) -> str:
    """The text without the sequences that set colours: what is in a log of many lines, and tells nothing."""
    return _COLOUR.sub("", text)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return {0x0A: "\\n", 0x0D: "\\r"}.get(code, f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
