"""Whole jobs that are killed or told to go, and go on by themselves: the result is that of a job left alone."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint import discovery
from tests.faults.resuming import TRAIN
from tests.ranks import in_soak

LIMIT = 90.0
SAVED = 75


def start(folder: Path, ranks: int, *fates: str, restarts: int = 0) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", str(ranks)]
    command += ["--max_restarts", str(restarts), str(script), str(folder), *fates]
    variables = {**os.environ, "LOCKSTEP_RUN_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate()
        pytest.fail(f"took more than {LIMIT} s\n{out}\n{err}", pytrace=False)
    return process.returncode, out, err


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    code, out, err = end(start(folder, 2))
    assert code == 0, out + err
    return result(folder)


@pytest.mark.parametrize("kills", [["0:13"], *in_soak(["1:6", "0:13"])], ids=["once", "twice"])
def test_killed_and_restarted_by_the_launcher(tmp_path: Path, left_alone: dict[str, Any], kills: list[str]) -> None:
    code, out, err = end(start(tmp_path, 2, *kills, restarts=3))
    assert code == 0, out + err
    # A save in the background may or may not have been complete when the rank died.
    began = [int(line.split()[-1]) for line in out.splitlines() if "began" in line]
    saved = {"1:6": (0, 4), "0:13": (8, 12)}
    assert began in [[0, *places] for places in itertools.product(*(saved[kill] for kill in kills))]
    assert result(tmp_path) == left_alone
    folder = tmp_path / "checkpoints"
    assert all(discovery.verify(path) == [] for path in folder.iterdir() if path.name.startswith("checkpoint"))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.soak)])
def test_told_to_go_it_saves_and_goes_on_later(
    tmp_path: Path, left_alone: dict[str, Any], number: signal.Signals
) -> None:
    process = start(tmp_path, 2, "slow")
    wait_for_checkpoint(tmp_path, process)
    process.send_signal(number)
    code, out, err = end(process)
    assert code == SAVED, out + err
    assert "the ranks have saved their state and exited" in err
    assert "failed" not in err
    assert not (tmp_path / "result.json").exists()
    code, out, err = end(start(tmp_path, 2))
    assert code == 0, out + err
    began = int(out.split("began ")[1].split()[0])
    assert began > 4  # later than the last save of the script's own
    assert result(tmp_path) == left_alone


@pytest.mark.soak
@pytest.mark.parametrize("resumed", [False, True])
def test_one_rank_that_is_told_takes_all_with_it(tmp_path: Path, left_alone: dict[str, Any], resumed: bool) -> None:
    process = start(tmp_path, 2, "slow")
    wait_for_checkpoint(tmp_path, process)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    ranks = [int(pid) for pid in children if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    os.kill(ranks[0], signal.SIGUSR1)
    code, out, err = end(process)
    assert code == SAVED, out + err
    assert "the ranks have saved their state and exited" in err
    if resumed:
        code, out, err = end(start(tmp_path, 2))
        assert result(tmp_path) == left_alone


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT
    while not (folder / "checkpoints" / "checkpoint_0").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
