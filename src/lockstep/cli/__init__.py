"""The ``lockstep`` command. Subcommands are modules here, imported when they are called, so that help is instant."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from lockstep import __version__
from lockstep.errors import LockstepError
from lockstep.rundir.printable import printable
from lockstep.topology import standard_streams

COMMANDS = {
    "launch": "run a script on everything this machine, or several, have",
    "config": "answer a few questions once, so that launch needs no flags",
    "test": "check this set-up with a short real job",
    "env": "say where this process would run, on what, and why",
    "watch": "show what every rank of a job is doing, live",
    "stacks": "print where every rank of a job is, down to the Python line",
    "doctor": "find out whether this machine, its network and the cluster are fit to train",
    "bundle": "put what a bug report needs into one zip, without secrets",
    "numerics": "keep the numbers of a run, compare two runs, look at them as a heat map",
    "checkpoint": "list, verify or prune checkpoints",
    "slurm": "write a batch file for SLURM",
    "explain": "print what an error or warning code means, such as LS1001",
    "estimate": "say what memory a model takes, before it is run",
}
"""Subcommand -> what it does; each is the module of its name, with ``add_arguments`` and ``run``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    standard_streams.replace()
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words and words[0] in COMMANDS else None
    try:
        code = _general(words) if name is None else _command(name, words[1:])
        sys.stdout.flush()  # here, where it can still be heard that nobody reads
        return code
    except LockstepError as error:
        print(f"lockstep {name}: {printable(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever reads has seen enough, as `head` does; what is left to be written at the end must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def list_names(title: str, names: Mapping[str, str]) -> str:
    """A table for a parser's epilog: each name, and what it does."""
    width = max(map(len, names)) + 2
    return "\n".join([f"{title}:", *(f"  {name:<{width}}{what}" for name, what in names.items())])


def _command(name: str, words: Sequence[str]) -> int:
    module = importlib.import_module(f"lockstep.cli.{name}")
    if getattr(module, "RAW", False):
        return int(module.run(words))
    return int(module.run(make_parser(name).parse_args(words)))


def make_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one subcommand."""
    module = importlib.import_module(f"lockstep.cli.{name}")
    if getattr(module, "RAW", False):
        parser: argparse.ArgumentParser = module.make_parser()
        return parser
    what = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"lockstep {name}", description=what[0].upper() + what[1:] + ".")
    module.add_arguments(parser)
    return parser


def _general(words: Sequence[str]) -> int:
    """What ``lockstep`` does without a subcommand: help, version, or a list of what there is."""
    parser = argparse.ArgumentParser(
        prog="lockstep",
        description="Train PyTorch models on one device or many.",
        epilog=list_names("commands", COMMANDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    parser.add_argument("command", metavar="COMMAND", nargs="?", choices=list(COMMANDS), help="one of those below")
    parser.parse_args(words)
    parser.print_help()
    return 0
