"""Nobody started this process as part of a job: it is alone."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import TopologyError
from lockstep.topology.environments import variables
from lockstep.topology.environments.placement import Placement


def detect(environ: Mapping[str, str]) -> bool:
    """Always: the last to be asked."""
    return True


def read(environ: Mapping[str, str]) -> Placement:
    """One process. Says so when it looks as if more were meant."""
    rank = environ.get("RANK", "").strip()
    if "WORLD_SIZE" not in environ and rank.isascii() and rank.isdecimal() and rank.strip("0"):
        # A rank above 0 means that there are others; each of them would train alone and overwrite the same files.
        raise TopologyError(
            f"RANK={rank} is set and WORLD_SIZE is not, so there is no telling how many processes the job has. "
            f"Set WORLD_SIZE too, or unset RANK to run one process."
        )
    return Placement(launcher="none", reason="no launcher's variables are set" + _doubt(environ))


def _doubt(environ: Mapping[str, str]) -> str:
    if "WORLD_SIZE" in environ and "RANK" not in environ:
        return f" (WORLD_SIZE={environ['WORLD_SIZE']} is, but without RANK it is not used)"
    if variables.text(environ, "SLURM_JOB_ID", "SLURM_JOBID") is not None:
        return " (this is a SLURM allocation, but srun did not start this process)"
    return ""
