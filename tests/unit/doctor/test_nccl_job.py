"""`lockstep doctor nccl --run`: a real job, whose script writes what NCCL would, into the file it was told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.doctor.nccl import job
from tests.unit.doctor.nccl_logs import rank_log

SCRIPT = """
import os, sys
from pathlib import Path

place = os.environ["NCCL_DEBUG_FILE"].replace("%h", os.uname().nodename).replace("%p", str(os.getpid()))
Path(place).write_text(Path(sys.argv[1]).read_text())
print("the job prints", os.environ["NCCL_DEBUG"])
sys.exit(7)
"""

DUPLICATE = "node0:1000:9 [0] init.cc:497 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1"


def test_a_job_is_started_and_its_logs_are_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "said.txt").write_text(rank_log(0, 1, then=[DUPLICATE]))
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "doctor",
        "nccl",
        "--json",
        "--run",
        "--cpu",
        "--",
        "train.py",
        "said.txt",
    ]
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(tmp_path / "run")}  # other jobs leave logs in a shared one
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert ended.returncode == 7, ended.stderr  # as the job ended
    told = json.loads(ended.stdout)  # what the job prints does not get into it
    assert "the job prints INFO" in ended.stderr
    assert told["exit code"] == 7
    (log,) = told["logs"]
    assert Path(log).parent == Path(told["run"]) / "nccl"
    first = next(finding for finding in told["findings"] if finding["check"] == "nccl first error")
    assert first["data"]["id"] == "duplicate-gpu"
    assert (Path(told["run"]) / "config.json").exists()


@pytest.mark.parametrize(
    ("set_", "level"), [({}, "INFO"), ({"NCCL_DEBUG": "WARN"}, "INFO"), ({"NCCL_DEBUG": "trace"}, "TRACE")]
)
def test_what_nccl_is_told(set_: dict[str, str], level: str) -> None:
    assert job.variables(Path("/runs/a/nccl"), set_) == {
        "NCCL_DEBUG": level,
        "NCCL_DEBUG_FILE": "/runs/a/nccl/%h.%p.log",
    }


def test_without_nccl_it_says_so() -> None:
    finding = job.silent(0)
    assert finding.status == "skipped"
    assert "no process used NCCL" in finding.what


def test_with_nccl_a_job_that_used_none_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_nccl", lambda: (True, ""))
    assert job.silent(1).status == "warning"
    assert "it failed before" in job.silent(1).what
    assert job.silent(0).status == "skipped"
