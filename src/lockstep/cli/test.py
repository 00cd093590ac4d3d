"""``lockstep test``: start the checks of `lockstep.testing.checks` the way a job is started, and see them pass."""

from __future__ import annotations

import argparse
import os
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand; all but ``--json`` are those of ``lockstep launch``."""
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        help="configuration file, instead of the default one",
    )
    parser.add_argument(
        "--num_processes", "--num-processes", metavar="N", help="total number of processes on all nodes", type=int
    )
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, even if there are accelerators")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Become ``lockstep launch``, so that its output, its exit code and the signals sent to us are its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command(arguments))


def command(arguments: argparse.Namespace) -> list[str]:
    """The command line that starts the checks."""
    options: list[str] = []
    if arguments.config_file is not None:
        options += ["--config_file", arguments.config_file]
    if arguments.num_processes is not None:
        options += ["--num_processes", str(arguments.num_processes)]
    if arguments.cpu:
        options.append("--cpu")
    checks = ["-m", "lockstep.testing.checks", *(["--json"] if arguments.json else [])]
    return [sys.executable, "-m", "lockstep", "launch", *options, *checks]
