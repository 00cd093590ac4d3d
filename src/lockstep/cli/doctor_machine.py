"""``lockstep doctor``: the checks of this machine, and, under a launcher, what its machines must have in common."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lockstep.config import env
from lockstep.doctor import table
from lockstep.doctor.finding import exit_code
from lockstep.doctor.run import run_checks
from lockstep.doctor.situation import Situation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="where checkpoints go (default: the current folder)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Look, and print; 1 when something is in error."""
    findings = run_checks(Situation(environ=env.snapshot(), folder=arguments.folder))
    if arguments.json:
        print(json.dumps({"findings": [finding.plain() for finding in findings]}, indent=2))
    else:
        print("\n".join([*table.lines(findings), table.summary(findings)]))
    return exit_code(findings)
