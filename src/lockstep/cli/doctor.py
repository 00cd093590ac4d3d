"""``lockstep doctor [net|mpi|nccl]``: is this machine, its network and the cluster fit to train."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from lockstep.cli import list_names
from lockstep.cli.help_format import HelpFormat

RAW = True
"""The command line is handed over as it is: each part of the doctor has options of its own."""

PARTS: dict[str, tuple[str, str]] = {
    "net": ("lockstep.cli.doctor_net", "test connections and collectives between all pairs of ranks"),
    "mpi": ("lockstep.cli.doctor_mpi", "check that mpirun can start a job on the hosts of a hostfile"),
    "nccl": (
        "lockstep.cli.doctor_nccl",
        "read NCCL's logs: what it selected, what failed first, what to do",
    ),
}
"""Part -> its module, with ``add_arguments`` and ``run``, and what it looks at."""
_MACHINE = (
    "lockstep.cli.doctor_machine",
    "check this machine, its network and the cluster",
)


def run(argv: Sequence[str]) -> int:
    """Run the part that is named first; the machine's own checks when none is. The exit code is 1 on errors."""
    words = list(argv)
    part = words.pop(0) if words and words[0] in PARTS else None
    module = _module(part)
    # A part that starts a job gets the words of that job as they are.
    begins = getattr(module, "JOB_AFTER", None)
    cut = words.index(begins) + 1 if begins in words else len(words)
    return int(module.run(make_parser(part).parse_args(words[:cut], argparse.Namespace(job=words[cut:]))))


def make_parser(part: str | None = None) -> argparse.ArgumentParser:
    """The options of one part, or of the node's own checks."""
    _, what = _MACHINE if part is None else PARTS[part]
    parser = argparse.ArgumentParser(
        prog="lockstep doctor" if part is None else f"lockstep doctor {part}",
        usage="lockstep doctor [options]\n       lockstep doctor PART [options]" if part is None else None,
        description=what[0].upper() + what[1:] + ".",
        epilog=list_names("parts", {name: text for name, (_, text) in PARTS.items()}) if part is None else None,
        formatter_class=HelpFormat,
    )
    _module(part).add_arguments(parser)
    return parser


def _module(part: str | None) -> Any:
    return importlib.import_module((_MACHINE if part is None else PARTS[part])[0])
