"""Restarts really recover: a rank that is killed at any step, again and again, on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import in_soak
from tests.restarting import TRAIN, fates


def restart(
    folder: Path, kills: int, ranks: int, limit: float, restarts: int | None = None
) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(TRAIN)
    argv = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", str(ranks)]
    argv += ["--max_restarts", str(kills if restarts is None else restarts), str(script), str(folder / "marks")]
    env = {**os.environ, "LOCKSTEP_RUN_DIR": str(folder / "run")}
    with subprocess.Popen(
        [*argv, *fates(kills, ranks, kills)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            out, err = process.communicate()
            pytest.fail(f"took more than {limit} s\n{out}\n{err}", pytrace=False)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


@pytest.mark.parametrize("kills", [1, *in_soak(2)])
def test_a_killed_rank_is_recovered_from(tmp_path: Path, kills: int) -> None:
    done = restart(tmp_path, kills, 2, 90.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"[0, 1] after {kills} kills") == 2
    for fate, left in zip(fates(kills, 2, kills), reversed(range(kills)), strict=True):
        assert f"Rank {fate[0]} was killed by SIGKILL" in done.stderr
        assert f"Starting again ({left} restarts left)" in done.stderr
    # What each attempt printed is kept apart.
    assert f"after {kills} kills" in (tmp_path / "run" / "logs" / f"attempt_{kills}" / "rank_0.out").read_text()


def test_when_restarts_are_used_up_the_last_failure_is_told(tmp_path: Path) -> None:
    done = restart(tmp_path, 2, 2, 90.0, restarts=1)
    assert done.returncode == 137, done.stdout + done.stderr
    last = fates(2, 2, 2)[1][0]
    box = done.stderr.partition("the job failed")[2]
    assert f"Rank {last} was killed by SIGKILL, in " in box
    assert f" on {os.uname().nodename}." in box


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        pytest.param(2, 10, marks=pytest.mark.soak),
        pytest.param(4, 10, marks=pytest.mark.soak),
        pytest.param(2, 140, marks=pytest.mark.soak_long),
        pytest.param(4, 30, marks=pytest.mark.soak_long),
    ],
)
def test_every_kill_is_recovered_from(tmp_path: Path, ranks: int, kills: int) -> None:
    done = restart(tmp_path, kills, ranks, 60.0 + 20.0 * kills)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"after {kills} kills") == ranks
