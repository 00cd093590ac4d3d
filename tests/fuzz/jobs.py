"""Jobs of several programs: started, waited for with a hard limit, and what they left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.program import draw

ROOT = Path(__file__).resolve().parents[2]

RUN = Path(__file__).with_name("run.py")
LIMIT = 120.0
"""Seconds for a job."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Programs to be run one after the other."""

    seeds: tuple[int, ...]
    ranks: int = 2
    launcher: str = "torchrun"
    library: str = "lockstep"
    choices: tuple[str, ...] = ()
    """Choices that all its programs make otherwise."""

    def __str__(self) -> str:
        return f"{self.seeds[0]}-{self.seeds[-1]}-{self.ranks}-{self.launcher}"

    def command(self, folder: Path) -> list[str]:
        """As it is started."""
        launchers = {
            "lockstep": ["lockstep", "launch", "--cpu", "--num_processes", str(self.ranks)],
            "torchrun": ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"],
        }
        program = [str(RUN), self.library, str(folder), *map(str, self.seeds), *self.choices]
        return [sys.executable, "-m", *launchers[self.launcher], *program]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A job that has ended."""

    code: int
    text: str
    """Its screen."""
    begun: int | None
    """The seed of the program that was under way when it ended."""
    programs: dict[int, list[dict[str, Any]]]
    """Of the programs that have ended on all ranks: what each rank saw."""

    def __str__(self) -> str:
        where = "" if self.begun is None else f" in {draw(self.begun)}"
        return f"exit code {self.code}{where}\n{self.text}"


def run(folder: Path, job: Job) -> Result:
    """Run a job to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),  # the ranks find tests.fuzz
        "LOCKSTEP_RUN_DIR": str(folder / "run"),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "1",  # without it, Accelerate makes each of several CPU processes the only one
    }
    with subprocess.Popen(
        job.command(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            text = f"took more than {LIMIT} s\n{_end(process, folder)}"
    written = [_lines(folder / f"{rank}.jsonl") for rank in range(job.ranks)]
    ended = [{line["seed"]: line for line in lines if "begins" not in line} for lines in written]
    programs = {seed: [lines[seed] for lines in ended] for seed in ended[0] if all(seed in lines for lines in ended)}
    begun = [line["seed"] for line in written[0] if line["seed"] not in programs]
    return Result(code=process.returncode, text=text, begun=begun[-1] if begun else None, programs=programs)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _end(process: subprocess.Popen[str], folder: Path) -> str:
    """End a job that hangs; the stacks of its ranks, and what it printed."""
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(folder / "run")}
    command = [sys.executable, "-m", "lockstep", "stacks"]
    stacks = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    process.terminate()
    try:
        text = process.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text = process.communicate()[0]
    return f"{stacks.stdout}{stacks.stderr}\n{text}"
