from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that can be: a disk takes milliseconds for each file that is written anew."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name) / "files"


def run(folder: Path, seed: int, count: int, limit: float) -> dict[str, int]:
    folder.mkdir()
    command = [sys.executable, "-m", "tests.integration.checkpoint.fuzz", str(folder), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_damaged_headers_and_indexes_never_do_harm(folder: Path) -> None:
    seen = run(folder, 20260, 2000, 120)
    assert sum(seen.values()) == 2000
    # Not all damage is visible, as that to a weight's value; but a fuzz that only meets one outcome tests little.
    assert set(seen) == {"index loaded", "index refused", "header loaded", "header refused"}
    assert min(seen.values()) > 20


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.soak_long if seed else pytest.mark.soak) for seed in range(11)]
)
def test_damaged_headers_and_indexes_at_length(folder: Path, seed: int) -> None:
    assert sum(run(folder, seed, 30_000, 600).values()) == 30_000
