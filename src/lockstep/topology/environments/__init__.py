"""Who started this process, and as which one: each launcher is one file that detects itself and reads its variables.

All of it are pure functions of a mapping; the process environment is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from lockstep.topology.environments import mpi, single, slurm, torchrun
from lockstep.topology.environments.placement import LAUNCHERS, Placement

__all__ = ["LAUNCHERS", "ORDER", "Environment", "Placement", "find"]


class Environment(NamedTuple):
    """One way of having been started."""

    name: str
    detect: Callable[[Mapping[str, str]], bool]
    read: Callable[[Mapping[str, str]], Placement]


# The innermost launcher is asked first: torchrun can run under srun or mpirun, and mpirun under srun; the other way
# round makes no sense. PMI_* alone proves little, because srun can set it too, so it is asked for after SLURM.
ORDER: tuple[Environment, ...] = (
    Environment("torchrun", torchrun.detect, torchrun.read),
    Environment("mpi", mpi.detect_named, mpi.read),
    Environment("slurm", slurm.detect, slurm.read),
    Environment("mpi by PMI", mpi.detect, mpi.read),
    Environment("single", single.detect, single.read),
)


def find(environ: Mapping[str, str]) -> Placement:
    """The place of a process that was started with this environment."""
    for environment in ORDER:
        if environment.detect(environ):
            return environment.read(environ)
    raise AssertionError("the last environment always detects")
