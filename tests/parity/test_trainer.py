"""A library that is built on Accelerate gets the same from Lockstep: the Trainer of transformers on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 240.0


@pytest.mark.soak
def test_the_trainer_of_transformers_trains_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = Path(__file__).parent / "their_trainer.py"
    environ = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    seen = {}
    for library in ("accelerate", "lockstep"):
        command = [*torchrun, str(script), str(tmp_path), library]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        # It did run on ours: only we say what a batch is in the end.
        assert ("lockstep.run: effective batch" in done.stderr) is (library == "lockstep")
        seen[library] = json.loads((tmp_path / f"{library}.json").read_text())
    theirs, ours = seen["accelerate"], seen["lockstep"]
    assert list(ours) == list(theirs)
    for way, found in theirs.items():
        assert len(found["logged"]) >= 3
        assert ours[way]["loss"] == pytest.approx(found["loss"], rel=1e-5), way
        for step, (mine, their) in enumerate(zip(ours[way]["logged"], found["logged"], strict=True)):
            assert mine == pytest.approx(their, rel=1e-4, abs=1e-7), (way, step)


@pytest.mark.soak
def test_the_trainer_of_transformers_evaluates_the_same_on_one_process(tmp_path: Path) -> None:
    """It passes the mean loss times the batch size, also of the last batch, and relies on the rest being dropped."""
    pytest.importorskip("transformers")
    script = Path(__file__).parent / "their_evaluation.py"
    environ = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    seen = {}
    for library in ("accelerate", "lockstep"):
        command = [sys.executable, str(script), str(tmp_path), library]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        seen[library] = json.loads((tmp_path / f"{library}.json").read_text())
    theirs, ours = seen["accelerate"], seen["lockstep"]
    assert len(theirs) == 66
    assert {name: found for name, found in ours.items() if found != theirs[name]} == {}
