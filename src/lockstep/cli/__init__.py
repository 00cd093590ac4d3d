"""The ``lockstep`` command. Subcommands are modules here, imported when they are called, so that help is instant."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from lockstep import __version__
from lockstep.errors import LockstepError

COMMANDS = {"env": "say where this process would run, on what, and why"}
"""Subcommand -> what it does; each is the module of its name, with ``add_arguments`` and ``run``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="lockstep", description="Train PyTorch models on one device or many.")
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, what in COMMANDS.items():
        module = importlib.import_module(f"lockstep.cli.{name}")
        module.add_arguments(commands.add_parser(name, help=what, description=what.capitalize() + "."))
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        return int(importlib.import_module(f"lockstep.cli.{arguments.command}").run(arguments))
    except LockstepError as error:
        print(f"lockstep {arguments.command}: {error}", file=sys.stderr)
        return 2
