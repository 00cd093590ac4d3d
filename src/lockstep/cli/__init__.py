"""The ``lockstep`` command. Subcommands are modules here, imported when they are called, so that help is instant."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from lockstep import __version__
from lockstep.cli.help_format import HelpFormat
from lockstep.errors import LockstepError
from lockstep.rundir.printable import printable
from lockstep.topology import standard_streams

COMMANDS = {
    "launch": "start a training script on one node or several",
    "config": "write the configuration file that launch reads",
    "test": "check this setup with a short distributed job",
    "env": "print versions, devices, limits and all settings with their source",
    "watch": "show what each rank of a running job is doing",
    "stacks": "print the Python stack of each rank",
    "doctor": "check this machine, its network and the cluster",
    "bundle": "collect what a bug report needs in a zip file, without secrets",
    "numerics": "record the numbers of a run, compare runs, draw a heat map",
    "checkpoint": "list, verify and prune checkpoints",
    "slurm": "write an sbatch file for SLURM",
    "explain": "explain the code of an error or a warning, such as LS1001",
    "estimate": "estimate the memory that training a model takes",
    "completion": "print a completion script for bash, zsh or fish",
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
    parser = argparse.ArgumentParser(
        prog=f"lockstep {name}", description=what[0].upper() + what[1:] + ".", formatter_class=HelpFormat
    )
    module.add_arguments(parser)
    return parser


def _general(words: Sequence[str]) -> int:
    """What ``lockstep`` does without a subcommand: help, version, or a list of what there is."""
    parser = argparse.ArgumentParser(
        prog="lockstep",
        usage="lockstep COMMAND [options]",
        description="Run PyTorch training scripts on one device or many. `lockstep COMMAND --help` lists the options.",
        epilog=list_names("commands", COMMANDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    parser.add_argument("command", metavar="COMMAND", nargs="?", choices=list(COMMANDS), help=argparse.SUPPRESS)
    parser.parse_args(words)
    parser.print_help()
    return 0
