"""Accelerate's own tests of several processes, run on Lockstep's objects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

LIMIT = 240.0


def test_accelerates_own_scripts_pass(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", "2"]
    script = Path(__file__).parent / "their_scripts.py"
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(tmp_path / "run"), "ACCELERATE_USE_CPU": "true"}
    command = [*program, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {name: became for name, became in seen.items() if became != "ok"} == {}
        assert len(seen) == 25
