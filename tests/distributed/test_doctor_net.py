"""``lockstep doctor net`` on real ranks of this machine: every way to start it, and ranks that do not come or die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import free_port

LIMIT = 120.0
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DOCTOR = [sys.executable, "-m", "lockstep", "doctor", "net"]


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return {**kept, "OMP_NUM_THREADS": "1", **extra}


def run(argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=environment(), cwd=cwd, capture_output=True, text=True, timeout=LIMIT, check=False)


def by_hand(world: int, started: int, *options: str) -> list[subprocess.Popen[str]]:
    """Ranks with the environment that a launcher would have given them."""
    port = free_port()
    place = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    return [
        subprocess.Popen(
            [*DOCTOR, "--cpu", "--json", *options],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(port), **place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(started)
    ]


def finding(report: dict[str, Any], check: str) -> dict[str, Any]:
    return next(each for each in report["findings"] if each["check"] == check)


def test_by_itself_with_all_measurements(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    files = ["--html", str(page), "--png", str(picture)]
    done = run([*DOCTOR, "--num_processes", "2", "--cpu", "--quick", "--send_recv", *files], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("rank ")] == ["OK", "OK"]
    assert "Rate by send and receive on the devices" in done.stdout
    assert "   4 MiB" in done.stdout
    assert "barrier and all_reduce gave the right values on 2 ranks" in done.stdout
    assert "<svg" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "picture.png"]


def test_the_guides_command_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--nnodes", "1"]
    # Torch's default port may be in use by a test beside this one.
    monkeypatch.setenv("PET_MASTER_PORT", str(free_port()))
    done = run([*torchrun, "-m", "lockstep", "doctor", "net", "--quick", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert [rank["ok"] for rank in report["ranks"]] == [True, True]
    (link,) = report["links"]
    assert link["compared_with"] == "memory copy"
    assert link["share"] > 0


def test_doctor_under_a_launcher_looks_at_the_machine_and_between_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    launch = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", "2"]
    done = run([*launch, "-m", "lockstep", "doctor", "--json", "--script", str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    checks = [each["check"] for each in report["findings"]]
    assert len(checks) == len(set(checks))  # once for the machine, not once for each rank
    assert {"kernel", "disk", "main port", "ranks", "connections"} <= set(checks)
    assert finding(report, "main port")["what"].endswith("can be reached")
    assert "script" in report["ranks"][0]["versions"]
    assert report["all_reduce"]["points"] == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_told_to_end_it_takes_its_ranks_along(number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*DOCTOR, "--num_processes", "2", "--cpu"],
        env=environment(),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "barrier and all_reduce" in line:
            break
    process.send_signal(number)
    began = time.monotonic()
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    assert f"ended by {number.name}; all processes are gone" in err
    assert time.monotonic() - began < 15  # a collective that has lost its others would take 20 s to give up


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    (rank,) = by_hand(2, 1, "--quick", "--patience", "2")
    out, err = rank.communicate(timeout=LIMIT)
    report = json.loads(out)
    assert rank.returncode == 1
    assert report["missing"] == [1]
    assert "rank 1 of 2 did not come" in finding(report, "ranks")["what"]
    assert "waiting for rank 1" in err


@pytest.mark.soak
def test_those_that_came_are_measured(tmp_path: Path) -> None:
    ranks = by_hand(3, 2, "--quick", "--patience", "8")
    outs = [rank.communicate(timeout=LIMIT) for rank in ranks]
    report = json.loads(outs[0][0])
    assert report["missing"] == [2]
    assert "rank 2 of 3 did not come" in finding(report, "ranks")["what"]
    assert ranks[0].returncode == 1
    assert "waiting for rank 2" in outs[0][1]
    assert report["links"][0]["forth"] > 0  # those that came are measured
    assert report["all_reduce"]["ranks"] == [0, 1]


@pytest.mark.soak
def test_a_store_that_nobody_hosts_is_told_by_those_that_wait(tmp_path: Path) -> None:
    _, second = ranks = by_hand(2, 2, "--patience", "4")
    ranks[0].kill()
    ranks[0].communicate()
    _, err = second.communicate(timeout=LIMIT)
    assert second.returncode == 1
    assert "cannot reach the job's store at 127.0.0.1" in err


@pytest.mark.soak
def test_a_rank_that_dies_while_it_is_measured(tmp_path: Path) -> None:
    ranks = by_hand(3, 3)
    assert ranks[0].stderr is not None
    for line in ranks[0].stderr:
        if "connecting" in line:
            time.sleep(0.3)
            os.kill(ranks[2].pid, signal.SIGKILL)
            break
    outs = [rank.communicate(timeout=LIMIT) for rank in ranks]
    report = json.loads(outs[0][0])
    assert ranks[0].returncode == 1
    assert [rank["ok"] for rank in report["ranks"]][2] is False


@pytest.mark.soak
def test_when_rank_0_dies_the_others_say_so(tmp_path: Path) -> None:
    ranks = by_hand(2, 2)
    assert ranks[0].stderr is not None
    for line in ranks[0].stderr:
        if "connecting" in line:
            time.sleep(0.3)
            ranks[0].kill()
            break
    _, err = ranks[1].communicate(timeout=LIMIT)
    ranks[0].communicate()
    assert ranks[1].returncode == 1
    assert "The job's store has gone away" in err
