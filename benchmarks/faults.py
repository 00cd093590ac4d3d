"""Jobs that go wrong, timed from the fault to the line on the screen that names its cause."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "faults" / "out_of_step.py"
EXPLAINED = r"lockstep guard: the ranks are out of step|Likely cause: "
SCENARIOS = {
    **dict.fromkeys(
        (
            *("shapes", "dtypes", "structures", "operations", "opposite order", "gather under main"),
            *("barrier under main", "raw", "leaves the loop early", "fewer batches", "skips an update"),
            *("raises and swallows it", "exits with 0"),
        ),
        EXPLAINED,
    ),
    "raises": "ValueError: sample 11 is broken",
    "exits with 3": r"exited with code 3|exitcode  : 3 ",
    "asked to end": r"was asked to stop \(SIGTERM\)|exitcode  : -15 ",
    "killed": r"was killed by SIGKILL|exitcode  : -9 ",
}
"""Scenario -> the line that names the cause: the guard's, or of a rank that ended the launcher's own."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """One job that went wrong."""

    scenario: str
    launcher: str
    diagnosis_s: list[float]
    """From the fault to the line on the screen, one figure a job."""
    over_s: list[float]
    """From the fault to the end of the job."""
    code: int


def run_job(scenario: str, launcher: str, folder: Path) -> tuple[float, float, int]:
    """Seconds from the fault to the diagnosis and to the end of the job, and its exit code."""
    command = {
        "lockstep": ["lockstep", "launch", "--cpu", "--num_processes", "2"],
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    }[launcher]
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    fault = told = 0.0
    lines = []
    with subprocess.Popen(
        [sys.executable, "-m", *command, str(SCRIPT), scenario],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"fault at ([\d.]+)", line):
                fault = max(fault, float(found[1]))
            elif not told and re.search(SCENARIOS[scenario], line):
                told = time.time()
    over = time.time()
    if not fault or not told:
        raise SystemExit(f"{scenario!r} under {launcher} was not explained:\n{''.join(lines)}")
    return told - fault, over - fault, process.returncode


def run_jobs(scenarios: Iterable[str], launchers: Sequence[str], times: int) -> list[Told]:
    """Each scenario under each launcher, so many times."""
    found = []
    jobs = [(scenario, launcher) for launcher in launchers for scenario in scenarios]
    for number, (scenario, launcher) in enumerate(jobs, 1):
        print(f"{number} of {len(jobs)}: {scenario} ({launcher})", file=sys.stderr)
        with tempfile.TemporaryDirectory() as name:
            runs = [run_job(scenario, launcher, Path(name) / str(run)) for run in range(times)]
        found.append(
            Told(
                scenario=scenario,
                launcher=launcher,
                diagnosis_s=[run[0] for run in runs],
                over_s=[run[1] for run in runs],
                code=runs[0][2],
            )
        )
    return found
