"""Who started this process, and as which one: each launcher is one file that detects itself and reads its variables.

All of it are pure functions of a mapping; the process environment is handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

from lockstep.topology.environments.placement import LAUNCHERS, Placement

__all__ = ["LAUNCHERS", "ORDER", "Environment", "Placement", "find"]


class Environment(NamedTuple):
    """One way of having been started. Its file is loaded only where variables of its kind are set."""

    name: str
    module: str
    detect: str
    prefixes: tuple[str, ...]
    """How the names of its variables begin."""


# The innermost launcher is asked first: torchrun can run under srun or mpirun, and mpirun under srun; the other way
# round makes no sense. PMI_* alone proves little, because srun can set it too, so it is asked for after SLURM.
ORDER: tuple[Environment, ...] = (
    Environment("torchrun", "torchrun", "detect", ("RANK", "WORLD_SIZE")),
    Environment("mpi", "mpi", "detect_named", ("OMPI_", "MV2_", "PALS_")),
    Environment("slurm", "slurm", "detect", ("SLURM_",)),
    Environment("mpi by PMI", "mpi", "detect", ("PMI_", "MPI_")),
    Environment("single", "single", "detect", ("",)),
)


def find(environ: Mapping[str, str]) -> Placement:
    """The place of a process that was started with this environment."""
    for environment in ORDER:
        if any(name.startswith(environment.prefixes) for name in environ) or environment.prefixes == ("",):
            module = import_module(f"{__name__}.{environment.module}")
            if getattr(module, environment.detect)(environ):
                place: Placement = module.read(environ)
                return place
    raise AssertionError("the last environment always detects")
