"""A rank that is slow in every step, for real: named with the phase; equal ranks are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_guard import run

SCRIPT = Path(__file__).parent / "slow.py"


@pytest.mark.parametrize("phase", ["backward", pytest.param("data", marks=pytest.mark.soak), "forward"])
def test_the_slow_rank_and_its_phase_are_named(tmp_path: Path, phase: str) -> None:
    done = run(tmp_path, phase, script=SCRIPT)
    assert done.code == 0, done
    assert "Rank 1 (" in done.text, done
    assert f"most of it in {phase}" in done.text, done
    assert done.text.count("slower than the other ranks") == 1, done


def test_equal_ranks_are_left_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "none", script=SCRIPT)
    assert done.code == 0, done
    assert "slower" not in done.text, done
