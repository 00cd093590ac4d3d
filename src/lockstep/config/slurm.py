"""What SLURM's variables say to both halves: to a process that may be a rank, and to one that starts ranks."""

from __future__ import annotations

from collections.abc import Mapping

# SLURM numbers the steps that srun starts up to here; above are the batch script, salloc's shell and their like.
_LAST_STEP = 0xFFFFFFF0
_STEP_WORDS = frozenset(("batch", "extern", "interactive", "tbd"))

STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
"""The variables that number a step, the better first."""
JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
"""The same for a job."""


def in_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, as against one that merely sits in an allocation (sbatch's, salloc's)."""
    step = next((value for name in STEP if (value := environ.get(name, "").strip())), None)
    if step is None or "SLURM_PROCID" not in environ or step.lower() in _STEP_WORDS:
        return False
    return not (step.isascii() and step.isdecimal() and (len(step) > 10 or int(step) > _LAST_STEP))
