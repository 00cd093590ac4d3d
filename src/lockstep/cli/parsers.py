"""Every command with its options, as data: for the reference pages and for shell completion."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from lockstep.cli import COMMANDS, make_parser
from lockstep.cli import doctor as doctor_command


def every_parser() -> dict[str, argparse.ArgumentParser]:
    """Name of a command without ``lockstep``, such as ``config update``, -> its parser, in the order of the help."""
    found: dict[str, argparse.ArgumentParser] = {}
    for name in COMMANDS:
        found.update(_with_subcommands(name, make_parser(name)))
        if name == "doctor":
            for part in doctor_command.PARTS:
                found[f"doctor {part}"] = doctor_command.make_parser(part)
    return found


def _with_subcommands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from _with_subcommands(f"{name} {word}", below)
