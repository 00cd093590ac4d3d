"""``lockstep doctor [net|mpi|nccl]``: is this machine, its network and the cluster fit to train."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from lockstep.cli import list_names

RAW = True
"""The command line is handed over as it is: each part of the doctor has options of its own."""

PARTS: dict[str, tuple[str, str]] = {
    "net": ("lockstep.cli.doctor_net", "how well the ranks of a job talk to each other, pair by pair"),
    "mpi": ("lockstep.cli.doctor_mpi", "whether mpirun can start a job on the machines of a host file"),
    "nccl": (
        "lockstep.cli.doctor_nccl",
        "what NCCL's logs say, in words: what it chose, what failed first, what to do",
    ),
}
"""Part -> its module, with ``add_arguments`` and ``run``, and what it looks at."""
_MACHINE = (
    "lockstep.cli.doctor_machine",
    "Find out whether this machine, its network and the cluster are fit to train",
)


def run(argv: Sequence[str]) -> int:
    """Run the part that is named first; the machine's own checks when none is. The exit code is 1 on errors."""
    words = list(argv)
    named = bool(words) and words[0] in PARTS
    module_name, what = PARTS[words[0]] if named else _MACHINE
    parser = argparse.ArgumentParser(
        prog=f"lockstep doctor {words[0]}" if named else "lockstep doctor",
        usage=None if named else "lockstep doctor [options]\n       lockstep doctor PART [options]",
        description=what[0].upper() + what[1:] + ".",
        epilog=None if named else list_names("parts", {name: text for name, (_, text) in PARTS.items()}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module = importlib.import_module(module_name)
    module.add_arguments(parser)
    words = words[1:] if named else words
    # A part that starts a job gets the words of that job as they are.
    begins = getattr(module, "JOB_AFTER", None)
    cut = words.index(begins) + 1 if begins in words else len(words)
    return int(module.run(parser.parse_args(words[:cut], argparse.Namespace(job=words[cut:]))))
