"""A rank that is late to join: it is named once, and the job goes on when it comes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 90.0
SCRIPT = """
import os, sys, time
import torch

if os.environ["RANK"] == "1":
    time.sleep(float(sys.argv[1]))
from lockstep import Accelerator

accelerator = Accelerator(cpu=True)
accelerator.print("gathered", accelerator.gather(torch.ones(1)).tolist())
"""


@pytest.mark.parametrize(
    ("launcher", "late"),
    [
        ("lockstep", 10),
        pytest.param("torchrun", 10, marks=pytest.mark.soak),
        pytest.param("lockstep", 1, marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_is_late_is_named_and_then_joins(launcher: str, late: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = ["-m", "lockstep", "launch", "--cpu", "--num_processes", "2"]
    if launcher == "torchrun":
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(late)],
        env={**os.environ, "LOCKSTEP_STALL_SECONDS": "7", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "gathered [1.0, 1.0]" in done.stdout
    assert done.stderr.count("rank 1 of 2 has not joined yet") == (1 if late > 1 else 0), done.stderr
