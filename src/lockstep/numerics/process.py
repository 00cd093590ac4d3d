"""Which process reports a NaN or infinite value, and where its report is kept: for tools without an accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep import current
from lockstep.config import env
from lockstep.errors import LockstepError
from lockstep.rundir import files
from lockstep.topology import environments


@dataclass(frozen=True, kw_only=True)
class Process:
    """This process among those of its job."""

    rank: int = 0
    world_size: int = 1
    folder: Path | None = None
    """Where reports are kept; None without a run directory."""

    @property
    def name(self) -> str:
        """ "rank 1"; empty for a process that is alone."""
        return f"rank {self.rank}" if self.world_size > 1 else ""


def this_process() -> Process:
    """As the job knows it, or else as the launcher's variables do."""
    session = current.peek()
    if session is not None:
        folder = None if session.directory is None else session.directory.numerics
        return Process(rank=session.topology.rank, world_size=session.topology.world_size, folder=folder)
    try:
        place = environments.find(env.snapshot())
    except LockstepError:  # joining the job raises this, where it matters
        return Process()
    return Process(rank=place.rank, world_size=place.world_size)


def append_report(folder: Path | None, rank: int, text: str) -> Path | None:
    """Add a report to the run's folder; the file, or None without a folder. A disk that fails must not hide it."""
    if folder is None:
        return None
    path = folder / f"rank_{rank}.txt"
    try:
        files.make_folder(folder)
        with open(path, "a", encoding="utf-8", opener=files.private) as file:
            file.write(text.strip() + "\n\n")
    except OSError:
        return None
    return path
