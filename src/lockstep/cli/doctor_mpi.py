"""``lockstep doctor mpi --hostfile FILE``: can mpirun start a job on these nodes, and what to do where it cannot."""

from __future__ import annotations

import argparse
import json
import sys

from lockstep.config import env
from lockstep.doctor import table
from lockstep.doctor.finding import exit_code, to_json
from lockstep.rundir.printable import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "--hostfile",
        "--mpirun_hostfile",
        required=True,
        metavar="FILE",
        help="the nodes, one on a line: node1, node1 slots=2 (Open MPI) or node1:2 (MPICH, Intel MPI)",
    )
    parser.add_argument(
        "--all_pairs", "--all-pairs", action="store_true", help="also try ssh from every node to every other"
    )
    parser.add_argument(
        "--ssh", metavar="PROGRAM", help="what to call instead of ssh (default: what mpirun is told to call)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Try, and print; 1 when something is in error."""
    from lockstep.doctor.mpi import examine

    findings = examine(
        arguments.hostfile,
        env.snapshot(),
        all_pairs=arguments.all_pairs,
        program=arguments.ssh,
        log=lambda text: print(f"lockstep doctor mpi: {printable(text)}", file=sys.stderr, flush=True),
    )
    if arguments.json:
        print(json.dumps(to_json(findings), indent=2))
    else:
        table.show(findings)
    return exit_code(findings)
