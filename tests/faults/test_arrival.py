"""A rank that is late to join: it is named once, and the job goes on when it comes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import free_port

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


@pytest.mark.soak
def test_a_first_rank_that_never_starts_is_missed_by_the_second(tmp_path: Path) -> None:
    """Without a launcher: nobody else could know, as when it is killed before it hosts the store."""
    script, screen = tmp_path / "script.py", tmp_path / "screen"
    script.write_text(SCRIPT)
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environ = {**os.environ, **place, "MASTER_PORT": str(free_port()), "LOCKSTEP_STALL_SECONDS": "7"}
    with open(screen, "wb") as file:
        process = subprocess.Popen([sys.executable, str(script), "0"], env=environ, stderr=file)
    try:
        deadline = time.monotonic() + LIMIT
        while b"rank 1 on " not in screen.read_bytes() and time.monotonic() < deadline:
            assert process.poll() is None, screen.read_text()
            time.sleep(0.1)
        assert "cannot reach the store at 127.0.0.1" in screen.read_text()
        assert "See that rank 0 runs" in screen.read_text()
    finally:
        process.kill()
        process.wait()
