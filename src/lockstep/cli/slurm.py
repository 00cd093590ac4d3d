"""``lockstep slurm``: write a batch file for SLURM that runs a script by ``lockstep launch``."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A job to be written down."""

    script: str
    """The training script, or a module's name."""
    args: tuple[str, ...] = ()
    module: bool = False
    nodes: int = 1
    gpus_per_node: int | None = None
    """GPUs to ask for on each; None asks for none, and takes what the partition gives."""
    processes_per_node: int | None = None
    """Processes on each; None: one per GPU, or as many as ``lockstep launch`` decides."""
    cpus_per_node: int | None = None
    """Cores to ask for on each; None leaves it to SLURM."""
    cpu: bool = False
    """Whether to train on the CPU."""
    directives: tuple[tuple[str, str], ...] = ()
    """Other options of sbatch, with their values."""
    extra: tuple[str, ...] = ()
    """Whole options of sbatch, as they stand in the file."""
    launch: tuple[str, ...] = ()
    """Options of ``lockstep launch``."""
    python: str = sys.executable
    """The interpreter on the nodes."""

    def text(self) -> str:
        """The file."""
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in self._options()), ""]
        if self.nodes > 1:
            lines.append("# This runs on the first node; `lockstep launch` starts itself on all of them, by srun.")
        # Replacing the shell, so that what SLURM signals reaches the launcher.
        return "\n".join([*lines, f"exec {shlex.join(self._command())}", ""])

    def _options(self) -> Iterator[str]:
        yield f"--nodes={self.nodes}"
        # One task for each node: the launcher there starts the ranks.
        yield "--ntasks-per-node=1"
        if self.cpus_per_node is not None:
            yield f"--cpus-per-task={self.cpus_per_node}"
        if self.gpus_per_node:
            yield f"--gpus-per-node={self.gpus_per_node}"
        yield from (f"--{name}={value}" for name, value in self.directives)
        yield from self.extra

    def _command(self) -> Iterator[str]:
        yield from (self.python, "-m", "lockstep", "launch")
        each = self.processes_per_node or self.gpus_per_node
        if each is not None:
            yield from ("--num_processes", str(each * self.nodes))
        if self.cpu:
            yield "--cpu"
        yield from self.launch
        if self.module:
            yield "-m"
        yield from (self.script, *self.args)


DIRECTIVES = {
    "time": ("LIMIT", "time limit of the job, such as 2:00:00 or 1-12"),
    "partition": ("NAME", "partition (queue)"),
    "account": ("NAME", "account to charge"),
    "qos": ("NAME", "quality of service"),
    "mem": ("SIZE", "memory on each node, such as 64G"),
    "job_name": ("NAME", "the job's name (default: the script's)"),
    "output": ("FILE", "file for the job's output (default: <job name>-<job number>.out)"),
}
"""Options of sbatch that go into the file as they are: what their value is called, and help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""

    def number(flag: str, text: str, default: int | None = None) -> None:
        parser.add_argument(*spellings(flag), type=int, metavar="N", default=default, help=text)

    parser.usage = "lockstep slurm [options] script.py [arguments of the script]"
    number("nodes", "nodes (default: 1)", 1)
    number("gpus_per_node", "GPUs to ask for on each node; one process is started for each")
    number("processes_per_node", "processes on each node, where there is not one per GPU")
    number("cpus_per_node", "cores to ask for on each node")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    for name, (metavar, text) in DIRECTIVES.items():
        parser.add_argument(*spellings(name), metavar=metavar, help=text)
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="any other option of sbatch, such as "
        "--sbatch=--constraint=a100; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--launch", default="", metavar="OPTIONS", help='options of lockstep launch, as one text: --launch="--debug"'
    )
    parser.add_argument("--file", default="train.sbatch", metavar="FILE", help="the file to write (train.sbatch)")
    parser.add_argument("--force", action="store_true", help="overwrite the file if it exists")
    parser.add_argument("--submit", action="store_true", help="submit it with sbatch")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's own arguments")


def spellings(name: str) -> list[str]:
    """A flag with underscores, and with hyphens."""
    return list(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))


def _flags() -> set[str]:
    numbers = ("nodes", "gpus_per_node", "processes_per_node", "cpus_per_node")
    return {flag for name in (*numbers, *DIRECTIVES, "submit") for flag in spellings(name)}


def run(arguments: argparse.Namespace) -> int:
    """Write the file, say what to do with it, and do it if asked to."""
    path = Path(arguments.file)
    problems = list(_problems(arguments, path))
    if problems:
        raise ConfigError.of(problems)
    try:
        path.write_text(batch(arguments).text(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another file with --file.") from None
    mine = sorted({word.partition("=")[0] for word in arguments.args} & _flags())
    if mine:
        which = f"{', '.join(mine)} after the script {'belongs' if len(mine) == 1 else 'belong'} to the script"
        print(f"lockstep slurm: {which}; what is meant for SLURM goes before it.", file=sys.stderr)
    if not arguments.submit:
        print(f"Wrote {path}. Look it over, then submit it:\n  sbatch {shlex.quote(str(path))}")
        return 0
    print(f"Wrote {path}.", flush=True)
    try:
        return subprocess.run(["sbatch", str(path)], check=False).returncode
    except OSError as error:
        raise ConfigError(
            f"--submit: sbatch cannot be run ({error.strerror}). Submit {path} on a node that has SLURM's commands."
        ) from None


def batch(arguments: argparse.Namespace) -> Batch:
    """What was asked for, as a job."""
    given = {name: getattr(arguments, name) for name in DIRECTIVES}
    name = given["job_name"] or re.sub(r"[^\w.-]", "-", Path(arguments.script).stem)
    # %x is the job's name and %j its number.
    values = {**given, "job_name": name, "output": given["output"] or "%x-%j.out"}
    return Batch(
        script=arguments.script,
        args=tuple(arguments.args),
        module=arguments.module,
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        processes_per_node=arguments.processes_per_node,
        cpus_per_node=arguments.cpus_per_node,
        cpu=arguments.cpu,
        directives=tuple((key.replace("_", "-"), _quoted(value)) for key, value in values.items() if value is not None),
        extra=tuple(arguments.sbatch),
        launch=tuple(shlex.split(arguments.launch)),
    )


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"[\s#]", value) else value


def _problems(arguments: argparse.Namespace, path: Path) -> Iterator[str]:
    for name in ("nodes", "gpus_per_node", "processes_per_node", "cpus_per_node"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            yield f"--{name.replace('_', '-')} is {value}, and must be at least 1. Leave it out for the default."
    if not arguments.module and not Path(arguments.script).is_file():
        yield f"The script {arguments.script!r} does not exist (looked in {Path.cwd()})."
    if arguments.cpu and arguments.gpus_per_node:
        yield f"--cpu and --gpus-per-node {arguments.gpus_per_node} contradict each other. Give one of them."
    if path.exists() and not arguments.force:
        yield f"{path} exists. Add --force to overwrite it, or name another file with --file."
    yield from _problems_with_texts(arguments)


def _problems_with_texts(arguments: argparse.Namespace) -> Iterator[str]:
    for name in DIRECTIVES:
        value = getattr(arguments, name)
        if value is not None and (not value.strip() or re.search(r'["\r\n]', value)):
            yield f"--{name.replace('_', '-')} is {value!r}: it may not be empty, nor hold quotes or line ends."
    for option in arguments.sbatch:
        if not option.startswith("-") or re.search(r"[\r\n]", option):
            yield f"--sbatch {option!r} must be an option of sbatch, on one line, such as --sbatch=--constraint=a100."
    try:
        shlex.split(arguments.launch)
    except ValueError as error:
        yield f"--launch {arguments.launch!r} cannot be split into options: {error}."
