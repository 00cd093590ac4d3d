"""What this machine has, and the configuration file that follows from it without a question."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import env, file
from lockstep.config.settings import read_precision
from lockstep.host import hardware

_TYPES = {"cuda": "MULTI_GPU", "cpu": "MULTI_CPU"}


@dataclass(frozen=True, kw_only=True)
class Detected:
    """The accelerators of this machine."""

    kind: str
    """torch's name of them (``cuda``, ``xpu``, …); ``cpu`` where there is none."""
    count: int

    @property
    def distributed_type(self) -> str:
        """What a configuration file calls a job on several of them."""
        return _TYPES.get(self.kind, f"MULTI_{self.kind.upper()}")

    def __str__(self) -> str:
        if not self.count:
            return "CPU only"
        name = "GPU" if self.kind == "cuda" else f"{self.kind.upper()} device"
        return f"{self.count} {name}{'s' if self.count > 1 else ''}"


def detect() -> Detected:
    """Look for accelerators; torch is imported only where there may be some."""
    count, kind = hardware.accelerators(env.snapshot())
    return Detected(kind=kind if count else "cpu", count=count)


def basic_values(found: Detected) -> dict[str, Any]:
    """The options that use all of a machine: a process per accelerator, else one on the CPU."""
    return {"cpu": not found.count, "multi_gpu": found.count > 1, "num_processes": max(found.count, 1)}


def write_basic(path: Path, found: Detected, mixed_precision: str) -> Path:
    """Write the options that use all of this machine."""
    values = {**basic_values(found), "mixed_precision": mixed_precision}
    return file.write(path, values, distributed_type=found.distributed_type if found.count > 1 else None)


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | bool:
    """Write a configuration file for this machine, as Accelerate's function of this name does.

    The path, or False where there is a file already: that one is not changed. Without ``save_location`` it is the
    file that ``lockstep launch`` reads by itself.
    """
    asked = str(mixed_precision).lower()
    read_precision(asked)
    if save_location is None:
        path = file.default_path(env.snapshot()).with_suffix(".yaml")
    else:
        path = Path(save_location).expanduser()
    if path.exists():
        print(
            f"The configuration file {path} exists and was not changed. "
            "`lockstep config` changes it; save_location= names another."
        )
        return False
    return write_basic(path, detect(), asked)
