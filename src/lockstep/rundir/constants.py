"""Names in the run directory that a rank needs before anything else is loaded: nothing is imported here."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SAVED = 75
"""The exit code of a rank that was told to go and has saved its state, and of the launcher when all have."""
LOG_FILE = "LOCKSTEP_LOG_FILE"
"""The variable that names the file into which the launcher writes a rank's stderr."""
VARIABLE = "LOCKSTEP_RUN_DIR"
"""The variable that names the run directory."""

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")


def rank_in(environ: Mapping[str, str]) -> int:
    """This process's number, whoever gave it."""
    text = next((environ[name] for name in _RANKS if environ.get(name)), "0")
    return int(text) if text.isdecimal() else 0


def stack_file(rank: int) -> str:
    """Where the stacks of a rank are written, in the folder `stacks`."""
    return f"rank_{rank}.txt"
