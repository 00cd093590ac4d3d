"""The example of a model whose blocks stay on disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "big_model.py"


def test_it_gives_the_logits_of_the_model_in_memory(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--blocks", "2", "--width", "64"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "the same logits: True" in done.stdout
    assert "held in memory:  0.3 of 0.7 MB" in done.stdout
