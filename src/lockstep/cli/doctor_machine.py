"""``lockstep doctor``: the checks of this machine, and, under a launcher, what its nodes must have in common."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import env
from lockstep.doctor import table
from lockstep.doctor.checks import CHECKS
from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding, exit_code, to_json
from lockstep.doctor.run import run_checks
from lockstep.topology import environments

if TYPE_CHECKING:
    from lockstep.doctor.checks import DoctorCheck


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder for checkpoints (default: the working directory)",
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="under a launcher: a script that must be the same on every node",
    )
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        help="configuration file with the rendezvous endpoint, instead of the default one",
    )
    parser.add_argument(
        "--main_process_ip", "--main-process-ip", metavar="HOST", help="address of node 0, to test the connection to it"
    )
    parser.add_argument(
        "--main_process_port",
        "--main-process-port",
        type=int,
        metavar="PORT",
        help="port of the rendezvous (default: 29500)",
    )
    parser.add_argument("--num_machines", "--num-machines", type=int, metavar="N", help="number of nodes of the job")
    parser.add_argument(
        "--num_processes", "--num-processes", type=int, metavar="N", help="number of processes of the job on all nodes"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the checks and print; 1 when one found an error."""
    environ = env.snapshot()
    place = environments.find(environ)
    if place.launcher == "none":
        findings = run_checks(_alone(arguments, environ), on_result=_CheckProgress().advance)
        if arguments.json:
            print(json.dumps(to_json(findings), indent=2))
        else:
            table.show(findings)
        return exit_code(findings)
    findings = []
    if place.local_rank == 0:
        # Before torch is there: a check is a fork of this process.
        context = DoctorContext(
            environ=environ,
            folder=arguments.folder,
            processes=place.local_world_size,
            machines=place.num_nodes,
            main_address=place.main_address,
            main_port=place.main_port or 29500,
            launched=place.agent_store,
        )
        # Cores and threads are the ranks' own: a launcher may have tied each to other ones.
        findings = run_checks(context, [check for check in CHECKS if check.name not in ("cores", "threads")])
    from lockstep.cli.doctor_net import in_rank
    from lockstep.doctor.net.program import NetOptions

    options = NetOptions(rates=False, script=arguments.script)
    return in_rank(options, place.rank, as_json=arguments.json, own_findings=tuple(findings))


def _alone(arguments: argparse.Namespace, environ: Mapping[str, str]) -> DoctorContext:
    """What the job will be, from the flags, the environment and the configuration file, as `lockstep launch` has it."""
    from lockstep.config import file

    values: Mapping[str, Any] = {}
    if arguments.config_file is not None or file.default_path(environ).exists():
        values = file.read(arguments.config_file or file.default_path(environ)).values

    def said(name: str, default: Any) -> Any:
        given = getattr(arguments, name)
        return given if given is not None else values.get(name) or default

    machines = int(said("num_machines", 1))
    return DoctorContext(
        environ=environ,
        folder=arguments.folder,
        processes=max(1, int(said("num_processes", machines)) // max(1, machines)),
        machines=machines,
        main_address=said("main_process_ip", environ.get("MASTER_ADDR")),
        main_port=int(said("main_process_port", environ.get("MASTER_PORT", 29500)) or 29500),
    )


class _CheckProgress:
    """On a terminal: how many checks have answered."""

    def __init__(self) -> None:
        self.done = 0

    def advance(self, check: DoctorCheck, findings: list[Finding]) -> None:
        """One more has."""
        self.done += 1
        if sys.stderr.isatty():
            end = "\r\x1b[K" if self.done == len(CHECKS) else ""
            sys.stderr.write(f"\r\x1b[K{self.done} of {len(CHECKS)} checks{end}")
            sys.stderr.flush()
