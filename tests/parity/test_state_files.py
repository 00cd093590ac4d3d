"""Each library loads the whole state that the other has saved: models, optimizers, schedulers, generators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_each_reads_the_others_folder_under_the_same_names(tmp_path: Path) -> None:
    script = Path(__file__).with_name("state_files.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    theirs, ours = lines[:2], lines[2:]
    assert [line.replace("accelerate ", "lockstep ", 1) for line in theirs] == ours
