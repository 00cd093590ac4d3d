"""Starting a job so that NCCL writes a log for each process into the run directory, and reading these afterwards."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lockstep.doctor import subprocess_launch
from lockstep.doctor.finding import Finding
from lockstep.doctor.nccl.read import Reading, read
from lockstep.rundir import constants, layout

FOLDER = "nccl"
"""NCCL's logs in the run directory."""
_TALKATIVE = ("INFO", "TRACE")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A job that has ended."""

    code: int
    directory: Path
    reading: Reading
    """What NCCL, and the ranks, wrote."""

    def plain(self) -> dict[str, Any]:
        """What is shown of it besides the reading."""
        return {"run": str(self.directory), "exit code": self.code}


def run(words: Sequence[str], environ: Mapping[str, str], output: TextIO | None = None) -> Ran:
    """Start ``lockstep launch`` with these words, wait for it, and read; ``output`` takes what the job prints."""
    directory = layout.make(environ.get(constants.VARIABLE), None)
    folder = directory.path / FOLDER
    try:
        if directory.note:
            print(directory.note, file=sys.stderr)
        folder.mkdir(mode=0o700, exist_ok=True)
        before = set(folder.iterdir())
        code = subprocess_launch.launch(
            words, {**environ, **variables(folder, environ), constants.VARIABLE: str(directory.path)}, output
        )
    finally:
        layout.sign_out(directory)
    written = sorted(file for file in folder.iterdir() if file not in before)
    # What torch says about NCCL goes to the ranks' own output.
    printed = sorted(file for file in directory.logs.glob("**/rank_*.err") if file.stat().st_size)
    reading = read([str(file) for file in (*written, *printed)]) if written or printed else read([])
    if not any(file.stat().st_size for file in written):
        kept = [finding for finding in reading.findings if finding.check != "log"]
        reading = Reading(logs=reading.logs, summary=reading.summary, findings=[silent(code), *kept])
    return Ran(code=code, directory=directory.path, reading=reading)


def variables(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What makes NCCL write: a file for each process, as its rank is not known to NCCL when it opens the file."""
    level = environ.get("NCCL_DEBUG", "").upper()
    return {
        "NCCL_DEBUG": level if level in _TALKATIVE else "INFO",
        "NCCL_DEBUG_FILE": str(folder / "%h.%p.log"),
    }


def silent(code: int) -> Finding:
    """Why no process has written a log."""
    available, why = _nccl()
    if not available:
        return Finding(
            check="nccl",
            status="skipped",
            what=f"no process used NCCL: {why}",
            why="without NCCL there is nothing to read; on the CPU the ranks talk over gloo",
            fix="Run this where the GPUs are.",
        )
    ended = "it failed before" if code else "it ran on the CPU, or as one process that talks to nobody"
    return Finding(
        check="nccl",
        status="warning" if code else "skipped",
        what=f"no process used NCCL: {ended}",
        why="NCCL opens its log with the first group of GPUs",
        fix="Look at the job's own output." if code else "Run it on at least two GPUs.",
    )


def _nccl() -> tuple[bool, str]:
    """Whether this torch has NCCL and a GPU to use it with, and why not."""
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return False, f"torch {torch.__version__} is built without it"
    if not torch.cuda.is_available():
        return False, "torch has it, but sees no GPU"
    return True, ""
