"""``lockstep explain CODE``: what the code at the end of a message stands for. Reads nothing but its own table."""

from __future__ import annotations

import argparse
import difflib
import json
import textwrap

from lockstep.codes import ENTRIES, CodeEntry
from lockstep.errors import ConfigError

_WIDTH = 88


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("code", metavar="CODE", nargs="?", help="a code such as LS1001; all codes without it")
    parser.add_argument("--json", action="store_true", help="print one JSON object: code -> its entry")


def run(arguments: argparse.Namespace) -> int:
    """Print one entry, or the list of all."""
    codes = list(ENTRIES) if arguments.code is None else [_known(arguments.code)]
    if arguments.json:
        print(json.dumps({code: ENTRIES[code]._asdict() for code in codes}, indent=2))
    elif arguments.code is None:
        print("\n".join(f"{code}  {entry.title}" for code, entry in ENTRIES.items()))
    else:
        print(_in_full(codes[0], ENTRIES[codes[0]]))
    return 0


def _known(text: str) -> str:
    """The code for what was typed: in any case, with or without LS, or the name of an exception."""
    asked = text.strip().upper()
    named = {entry.source.upper(): code for code, entry in ENTRIES.items()}
    for candidate in (asked, f"LS{asked}", named.get(asked, "")):
        if candidate in ENTRIES:
            return candidate
    near = difflib.get_close_matches(asked, [*ENTRIES, *named], n=1)
    hint = f"Did you mean {named.get(near[0], near[0])}?" if near else "`lockstep explain` lists all codes."
    raise ConfigError(f"{text!r} is not a known code. {hint}")


def _in_full(code: str, entry: CodeEntry) -> str:
    parts = [f"{code}: {entry.title} ({entry.source})"]
    for label, text in (("What happened", entry.happened), ("Why", entry.why), ("What to do", entry.fix)):
        parts.append(f"{label}\n{textwrap.fill(text, _WIDTH, initial_indent='  ', subsequent_indent='  ')}")
    parts.append(f"More: docs/{entry.page}")
    return "\n\n".join(parts)
