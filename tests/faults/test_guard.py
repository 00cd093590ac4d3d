"""Ranks that fall out of step, for real: who is named, which line, why; and those that only look as if they did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.blackbox.read import read_all
from lockstep.blackbox.snapshot import Snapshot
from tests.distributed.test_launchers import free_port

SCRIPT = Path(__file__).parent / "out_of_step.py"
LINES = {
    line.rpartition("# mark: ")[2].strip(): number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if "# mark: " in line
}
LIMIT = 60.0
STOPPED = 86


@dataclass
class Result:
    code: int
    text: str
    seconds: float

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s\n{self.text}"


def run(
    folder: Path, scenario: str, *args: str, ranks: int = 2, launcher: str = "lockstep", script: Path = SCRIPT
) -> Result:
    command = {
        "lockstep": [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", str(ranks)],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"],
    }[launcher]
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    with subprocess.Popen(
        [*command, str(script), scenario, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                text, _ = process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                text, _ = process.communicate()
            pytest.fail(f"took more than {LIMIT} s\n{text}", pytrace=False)
    return Result(process.returncode, text, time.monotonic() - start)


def at(mark: str) -> str:
    return f"out_of_step.py:{LINES[mark]}"


# Scenario, the exit code, what the screen must say. The odd rank is the last one.
STOPS: list[tuple[str, list[str]]] = [
    ("shapes", ["shape mismatches", "[2], float32", "[3], float32", at("shapes"), "pad_across_processes"]),
    ("dtypes", ["float32", "float64", at("dtypes")]),
    ("structures", [at("structures"), "tuple", "dict"]),
    ("operations", ["different operations", at("reduce"), at("gather")]),
    ("opposite order", ["different operations", at("gather first"), at("reduce first")]),
    ("gather under main", [at("gather under main"), at("after gather"), "is_main_process"]),
    ("barrier under main", [at("barrier under main"), at("backward"), "is_main_process"]),
    ("raw", [at("all_reduce"), at("barrier"), "all_reduce", "barrier"]),
    ("leaves the loop early", [at("backward"), at("end")]),
    ("skips an update", [at("backward"), "skipped an update"]),
    ("raises", ["ValueError: sample 11 is broken", at("raises")]),
    ("exits with 0", [at("backward")]),
    ("killed", ["killed"]),
]


def check(result: Result, parts: list[str]) -> None:
    assert result.code != 0, result
    for part in parts:
        assert part in result.text, f"{part!r} is not in\n{result}"


@pytest.mark.parametrize(("scenario", "parts"), STOPS, ids=[name for name, _ in STOPS])
def test_the_job_stops_and_says_why(tmp_path: Path, scenario: str, parts: list[str]) -> None:
    check(run(tmp_path, scenario), parts)


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["lockstep", "torchrun"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("scenario", "parts"), STOPS, ids=[name for name, _ in STOPS])
def test_on_more_ranks_and_by_torchrun(
    tmp_path: Path, scenario: str, parts: list[str], ranks: int, launcher: str
) -> None:
    check(run(tmp_path, scenario, ranks=ranks, launcher=launcher), parts)


@pytest.mark.parametrize("scenario", ["raw", "leaves the loop early"])
def test_by_torchrun_too(tmp_path: Path, scenario: str) -> None:
    check(run(tmp_path, scenario, launcher="torchrun"), dict(STOPS)[scenario])


STALLS = [
    ("sleeps", "time.sleep", at("sleeps")),
    ("endless loop", "while", at("loops")),
    ("stuck in the loader", "data loader", at("loader")),
]


@pytest.mark.parametrize(("scenario", "what", "line"), STALLS, ids=[name for name, *_ in STALLS])
def test_what_may_still_end_is_told_and_left_running(tmp_path: Path, scenario: str, what: str, line: str) -> None:
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(tmp_path / "run"), "LOCKSTEP_STALL_SECONDS": "3"}
    command = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", "2", str(SCRIPT), scenario]
    told = tmp_path / "run" / "diagnosis.txt"
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
        try:
            deadline = time.monotonic() + LIMIT
            while not told.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(1.0)
            assert process.poll() is None, (tmp_path / "output").read_text()
        finally:
            process.terminate()
            process.wait(timeout=60)
    shown = (tmp_path / "output").read_text()
    assert told.exists(), shown
    for part in ("rank 1", "rank 0", what, line, at("backward")):
        assert part in told.read_text(), told.read_text()
    assert told.read_text().strip().splitlines()[0] in shown


def test_a_rank_alone_for_a_while_is_no_error(tmp_path: Path) -> None:
    done = run(tmp_path, "alone for a while", "8")
    assert done.code == 0, done
    assert "all done" in done.text
    assert "guard" not in done.text


def test_a_collective_that_is_waited_for_later_is_no_error(tmp_path: Path) -> None:
    done = run(tmp_path, "a handle for later", "5")
    assert done.code == 0, done
    assert "guard" not in done.text


def test_a_mismatch_that_all_ranks_caught_is_no_error(tmp_path: Path) -> None:
    done = run(tmp_path, "", script=SCRIPT.with_name("caught.py"))
    assert done.code == 0, done
    assert "went on" in done.text
    assert "guard" not in done.text


def test_a_paused_rank_is_no_error(tmp_path: Path) -> None:
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(tmp_path / "run")}
    command = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", "2", str(SCRIPT), "paused"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as process:
        deadline = time.monotonic() + LIMIT
        boxes: list[Snapshot] = []
        while time.monotonic() < deadline and not (len(boxes) == 2 and all(box.entered > 5 for box in boxes)):
            boxes = read_all(tmp_path / "run" / "boxes")
            time.sleep(0.05)
        os.kill(boxes[1].pid, signal.SIGSTOP)
        time.sleep(4.0)
        os.kill(boxes[1].pid, signal.SIGCONT)
        text, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, text
    assert "guard" not in text


def test_a_deadlock_is_not_started_again(tmp_path: Path) -> None:
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(tmp_path / "run")}
    command = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", "2", "--max_restarts", "3"]
    done = subprocess.run(
        [*command, str(SCRIPT), "raw"], capture_output=True, text=True, timeout=LIMIT, env=environ, check=False
    )
    assert done.returncode == STOPPED, done.stderr
    assert "Starting again" not in done.stderr
    assert (tmp_path / "run" / "diagnosis.json").exists()


def test_ranks_of_a_notebook_are_watched_too(tmp_path: Path) -> None:
    script = tmp_path / "cell.py"
    script.write_text(
        "import torch\nimport torch.distributed as dist\nfrom lockstep import Accelerator, debug_launcher\n\n\n"
        "def train():\n    if Accelerator().process_index:\n        dist.all_reduce(torch.ones(2))\n"
        "    else:\n        dist.barrier()\n\n\ndebug_launcher(train)\n"
    )
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=LIMIT, env=environ, check=False
    )
    assert done.returncode == 1, done.stderr
    for part in ("lockstep guard", "cell.py:8", "cell.py:10", f"exit code {STOPPED}"):
        assert part in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_rank_takes_over_from_a_watcher_that_has_died(tmp_path: Path) -> None:
    script = SCRIPT.with_name("taken_over.py")
    port = free_port()
    ranks = []
    for rank in range(3):
        place = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": port}
        environ = {**os.environ, **{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1"}
        environ["LOCKSTEP_RUN_DIR"] = str(tmp_path / "run")
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
            )
        )
    try:
        texts = [process.communicate(timeout=LIMIT)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [-signal.SIGKILL, STOPPED, STOPPED], "\n".join(texts)
    assert "lockstep guard" in texts[1], texts[1]  # the lowest that lives
    assert "lockstep guard" not in texts[2], texts[2]
    for part in ("rank 1 waits in torch's all_reduce", "rank 2 waits in torch's barrier"):
        assert part in " ".join(texts[1].split()), texts[1]
