"""Stacks of ranks that run, for real; and processes that must not be sent the signal."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.blackbox import read
from lockstep.blackbox.snapshot import Snapshot
from lockstep.cli import stacks, watch
from lockstep.errors import ConfigError
from lockstep.rundir.layout import RunDirectory

SCRIPT = Path(__file__).parent / "out_of_step.py"
LINES = {
    line.rpartition("# mark: ")[2].strip(): number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if "# mark: " in line
}
LIMIT = 60.0


@dataclass
class Job:
    process: subprocess.Popen[bytes]
    directory: RunDirectory
    output: Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two ranks: 1 sleeps, 0 waits for it in a backward."""
    folder = tmp_path_factory.mktemp("stacks")
    directory = RunDirectory(path=folder / "run")
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(directory.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", "2", str(SCRIPT), "sleeps"]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
        try:
            deadline = time.monotonic() + LIMIT
            while not is_stuck(directory):
                assert process.poll() is None, (folder / "output").read_text()
                assert time.monotonic() < deadline, (folder / "output").read_text()
                time.sleep(0.2)
            yield Job(process, directory, folder / "output")
        finally:
            process.terminate()
            process.wait(timeout=60)


def is_stuck(directory: RunDirectory) -> bool:
    boxes = watch.read_ranks(directory)
    if len(boxes) < 2 or boxes[0].op is None or not boxes[0].op.name.startswith("backward"):
        return False
    return boxes[0].now - boxes[0].op.since > 2 and boxes[1].stack != ()


def call(run: str, as_json: bool = False) -> int:
    return stacks.run(argparse.Namespace(run=run, json=as_json))


def test_every_rank_shows_its_main_thread(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the second answer is not the first one
        assert call(str(job.directory.path)) == 0
        first, second = capsys.readouterr().out.rstrip().split("\n\n")
        assert first.startswith(f"rank 0 on {os.uname().nodename} (pid ")
        assert f"out_of_step.py:{LINES['backward']} for " in first.splitlines()[0]
        assert f'out_of_step.py", line {LINES["backward"]}, in train\n    accelerator.backward(loss)' in first
        assert second.splitlines()[-2].endswith(f'out_of_step.py", line {LINES["sleeps"]}, in train')
        assert second.splitlines()[-1].startswith("    time.sleep(SECONDS)")
        for text in (first, second):
            assert text.splitlines()[1].endswith("in <module>")
            assert text.count("in <module>") == 1
            assert "worker.py" not in text
    assert job.process.poll() is None


def test_one_rank_by_its_process(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    pid = read.read_all(job.directory.boxes)[1].pid
    assert call(str(pid), as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["run"] == str(job.directory.path)
    (rank,) = said["ranks"]
    assert (rank["rank"], rank["pid"], rank["problem"]) == (1, pid, "")
    assert (rank["stack"][-1]["line"], rank["stack"][-1]["function"]) == (LINES["sleeps"], "train")


def test_a_process_that_listens_to_another_run_is_left_alone(job: Job, tmp_path: Path) -> None:
    box = read.read_all(job.directory.boxes)[1]
    size = job.directory.stack(1).stat().st_size
    (told,) = stacks.request_stacks(RunDirectory(path=tmp_path), [box])
    assert "no stack: " in told.problem  # its own run's file is the one that it holds open
    assert job.directory.stack(1).stat().st_size == size


def test_the_launcher_is_no_rank(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """Its environment names the run too, but it does not listen."""
    assert call(str(job.process.pid)) == 1
    assert "does not listen for SIGUSR2" in capsys.readouterr().out
    assert job.process.poll() is None


def test_watching_shows_who_is_blocked(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    deadline = time.monotonic() + LIMIT
    while True:
        assert watch.run(argparse.Namespace(run=str(job.directory.path), once=True, json=True)) == 0
        first, second = json.loads(capsys.readouterr().out)["ranks"]
        if first["state"] == "blocked" or time.monotonic() > deadline:
            break
    assert (first["state"], second["state"]) == ("blocked", "running")
    assert first["doing"].startswith("in backward #")
    assert first["site"].endswith(f"out_of_step.py:{LINES['backward']}")
    assert first["steps_per_second"] == 0.0
    assert first["memory_bytes"] > 2**20
    assert second["site"].endswith(f"out_of_step.py:{LINES['sleeps']}")
    assert watch.run(argparse.Namespace(run=str(job.directory.path), once=False, json=False)) == 0  # no terminal
    assert "(blocked)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "named", "why"),
    [
        ("import time", True, "does not listen"),
        ("import signal, time; signal.signal(signal.SIGUSR2, lambda *_: sys.exit(3))", True, "does not listen"),
        ("import faulthandler, signal; faulthandler.register(signal.SIGUSR2)", False, "does not listen"),
    ],
    ids=["no handler", "the script's own handler", "another process"],
)
def test_who_does_not_listen_is_not_signalled(tmp_path: Path, code: str, named: bool, why: str) -> None:
    directory = RunDirectory(path=tmp_path)
    directory.stacks.mkdir()
    directory.stack(0).touch()
    environ = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_RUN_DIR"}
    script = f"import sys, time; {code}; print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**environ, "LOCKSTEP_RUN_DIR": str(tmp_path)} if named else environ,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (told,) = stacks.request_stacks(directory, [Snapshot(rank=0, world_size=1, pid=process.pid)])
        process.terminate()
        assert process.wait(timeout=20) == -signal.SIGTERM
        assert why in told.problem
        (told,) = stacks.request_stacks(directory, [Snapshot(rank=0, world_size=1, pid=process.pid)])
        assert told.problem == "no stack: the process has ended"


def test_a_process_that_is_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={}) as process:
        with pytest.raises(ConfigError, match="is not a rank of a known job"):
            call(str(process.pid))
        assert process.poll() is None
        process.terminate()


def test_torch_is_not_imported() -> None:
    code = "import sys, lockstep.cli.stacks, lockstep.cli.watch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT, check=False).returncode == 0
