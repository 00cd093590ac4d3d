"""Real jobs for the tests of the guard."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lockstep.testing import run_ranks

HERE = Path(__file__).parent
LIMIT = 90.0
"""Seconds for a job, unless it says otherwise: those beside it make it slower."""
MARK = "# mark: "


@dataclass(frozen=True, kw_only=True)
class Job:
    """A script to be started on several ranks."""

    scenario: str = ""
    """The script's first argument."""
    seconds: float | None = None
    """The script's second argument."""
    script: str = "out_of_step.py"
    """A file of this folder."""
    ranks: int = 2
    launcher: str = "lockstep"
    options: tuple[str, ...] = ()
    """More for the launcher."""
    environ: tuple[tuple[str, str], ...] = ()
    """Variables for this job only."""
    limit: float = LIMIT

    def __str__(self) -> str:
        return f"{self.scenario or self.script}-{self.ranks}-{self.launcher}"

    @property
    def command(self) -> list[str]:
        """As it is started."""
        launchers = {
            "lockstep": ["lockstep", "launch", "--cpu", "--num_processes", str(self.ranks)],
            "torchrun": ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"],
        }
        return [sys.executable, "-m", *launchers[self.launcher], *self.options, *self.argv]

    @property
    def argv(self) -> list[str]:
        """The script and its arguments."""
        arguments = [self.scenario] if self.seconds is None else [self.scenario, str(self.seconds)]
        return [str(HERE / self.script), *filter(None, arguments)]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A job that has ended."""

    code: int
    text: str
    """Its screen."""
    ended: float
    """When."""
    run: Path
    """Its run directory."""

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.text}"

    @property
    def words(self) -> str:
        """The screen without line breaks, which depend on how long the names of folders are."""
        return " ".join(re.sub(r"^\[rank\d+\]: ", "", self.text, flags=re.MULTILINE).split())

    @property
    def seconds_since_fault(self) -> float:
        """From the fault, as the script told its time, to the end of the job."""
        return self.ended - max(float(told) for told in re.findall(r"fault at ([\d.]+)", self.text))


def run(folder: Path, job: Job) -> Result:
    """Run a job to its end."""
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1", **dict(job.environ)}
    with subprocess.Popen(
        job.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=job.limit)
        except subprocess.TimeoutExpired:
            text = f"took more than {job.limit} s\n{_end(process)}"
    return Result(code=process.returncode, text=text, ended=time.time(), run=folder / "run")


def _end(process: subprocess.Popen[str]) -> str:
    process.terminate()
    try:
        return process.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def run_in_pool(job: Job) -> Result:
    """Run a job's script on ranks that are there already: for what the ranks find by themselves, without a launcher."""
    outcomes = run_ranks(
        _run_script, job.ranks, job.argv, timeout=job.limit, on_failure="collect", env=dict(job.environ)
    )
    text = "".join(f"{outcome.output}\n{outcome.error_text}\n" for outcome in outcomes)
    return Result(code=int(not all(outcome.ok for outcome in outcomes)), text=text, ended=time.time(), run=Path())


def _run_script(argv: list[str]) -> None:
    sys.argv[:] = argv
    runpy.run_path(argv[0], run_name="__main__")


def marks(script: str = "out_of_step.py") -> dict[str, str]:
    """Mark -> ``file:line``."""
    lines = (HERE / script).read_text().splitlines()
    return {
        line.rpartition(MARK)[2].strip(): f"{script}:{number}" for number, line in enumerate(lines, 1) if MARK in line
    }
