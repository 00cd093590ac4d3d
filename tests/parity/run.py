"""Running the script of this folder under either library, and reading what it wrote."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "script"
LIBRARIES = ("accelerate", "lockstep")
TIME_LIMIT = 240.0
_IMPORT = re.compile(r"^from accelerate\b", re.MULTILINE)

# Accelerate does not have it: under Lockstep this is what restores Accelerate's arithmetic.
OPTIONS = {"accelerate": [], "lockstep": ["tail_divisor=window"]}

Seen = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What the ranks of both libraries saw on one number of processes."""

    world_size: int
    accelerate: list[Seen]
    lockstep: list[Seen]

    def pairs(self, name: str) -> list[tuple[Any, Any]]:
        """Per rank, what Accelerate saw and what Lockstep saw in one scenario."""
        return [(theirs[name], ours[name]) for theirs, ours in zip(self.accelerate, self.lockstep, strict=True)]

    def has(self, name: str) -> bool:
        """Whether a scenario has exactly this name."""
        return name in self.accelerate[0]

    def names(self, prefix: str) -> list[str]:
        """The scenarios whose names begin like this."""
        return [name for name in self.accelerate[0] if name.startswith(prefix)]


def run_both(world_size: int, folder: Path) -> Runs:
    """The script under both libraries at the same time, each on so many processes."""
    started = {library: _start(library, world_size, folder / library) for library in LIBRARIES}
    problems = []
    try:
        for library, process in started.items():
            output, _ = process.communicate(timeout=TIME_LIMIT)
            if process.returncode:
                problems.append(f"{library} on {world_size}: exit code {process.returncode}\n{output}")
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    if problems:
        raise RuntimeError("\n".join(problems))
    seen = {
        library: [json.loads((folder / library / f"{rank}.json").read_text()) for rank in range(world_size)]
        for library in LIBRARIES
    }
    return Runs(world_size=world_size, **seen)


def _start(library: str, world_size: int, folder: Path) -> subprocess.Popen[str]:
    shutil.copytree(SCRIPT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in folder.glob("*.py"):
        file.write_text(_IMPORT.sub(f"from {library}", file.read_text()))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command = [sys.executable, *(launcher if world_size > 1 else []), str(folder / "main.py"), str(folder)]
    # Without ACCELERATE_USE_CPU, Accelerate makes each of two CPU processes the only one of its world.
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "LOCKSTEP_"))},
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [*command, *OPTIONS[library]],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
