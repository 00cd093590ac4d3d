"""What a killed process leaves: only what is surely the job's own is ended or removed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.launch import leftovers

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc to find processes in")
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def run(*argv: str, **options: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(argv, **options))  # type: ignore[call-overload]
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def helper(tmp_path: Path) -> str:
    """A program that is called like torch's, and only sleeps."""
    return shutil.copy("/bin/sleep", tmp_path / "torch_shm_manager")


def ended(process: subprocess.Popen[bytes]) -> int:
    return process.wait(10)


def test_a_signal_to_a_group_is_not_for_those_who_clean_up(start: Start, helper: str) -> None:
    rank = start("sleep", "60", process_group=0)
    worker, manager = start("sleep", "60", process_group=rank.pid), start(helper, "60", process_group=rank.pid)
    other = start("sleep", "60", start_new_session=True)
    leftovers.signal_group(rank.pid, signal.SIGTERM)
    assert ended(rank) == ended(worker) == -signal.SIGTERM
    assert manager.poll() is other.poll() is None


def test_who_cleans_up_is_ended_when_it_does_not_end(
    start: Start, helper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "_PATIENCE", 0.5)
    rank = start("sleep", "60", process_group=0)
    manager, other = start(helper, "60", process_group=rank.pid), start("sleep", "60", start_new_session=True)
    began = time.monotonic()
    leftovers.end_groups([rank.pid])
    assert time.monotonic() - began >= 0.5
    assert ended(rank) == ended(manager) == -signal.SIGKILL
    assert other.poll() is None


def test_marked_processes_are_found_wherever_they_are(start: Start) -> None:
    environ = {**os.environ, leftovers.VARIABLE: "/tmp/lockstep-this"}
    mine = start("sleep", "60", start_new_session=True, env=environ)
    other = start("sleep", "60", env={**environ, leftovers.VARIABLE: "/tmp/lockstep-this-one"})
    leftovers.end_marked("/tmp/lockstep-this", group=os.getpgrp())
    assert mine.poll() is None
    leftovers.end_marked("/tmp/lockstep-this")
    assert ended(mine) == -signal.SIGKILL
    assert other.poll() is None


def test_files_of_dead_processes_of_this_job_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setenv("TMPDIR", "/tmp")
    old = tmp_path / "torch_1000001_1_0"
    old.touch()
    os.utime(old, (1, 1))
    mark = leftovers.make_folder()
    assert Path(mark).stat().st_mode & 0o077 == 0
    for pid in (1000001, 1000002, os.getpid()):
        Path(mark, str(pid)).touch()
    names = ["torch_1000001_5_1", "torch_1000002_6_2", "torch_1000003_7_3", f"torch_{os.getpid()}_8_4", "sem.mp-x"]
    for name in names:
        (tmp_path / name).touch()
    process = start("sleep", "60", env={**os.environ, leftovers.VARIABLE: mark})
    leftovers.remove_files(mark)  # one of the job lives
    assert len(list(tmp_path.iterdir())) == 6
    process.kill()
    process.wait()
    leftovers.remove_files(mark)
    assert not Path(mark).exists()
    assert {path.name for path in tmp_path.iterdir()} == {old.name, *names[2:]}
    leftovers.remove_files(mark)


def test_a_place_for_temporary_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    long = tmp_path / ("x" * 90)
    long.mkdir()
    for folder in (str(tmp_path / "nowhere"), str(long)):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        mark = leftovers.make_folder()
        assert not os.path.exists(mark)
        leftovers.use_folder(mark)
        leftovers.remove_files(mark)
    assert not list(long.iterdir())


def test_multiprocessing_uses_the_folder(tmp_path: Path) -> None:
    folder = Path(leftovers.make_folder())
    script = (
        "import os, sys\nfrom lockstep.launch import leftovers\nleftovers.use_folder(sys.argv[1])\n"
        "import multiprocessing\nfrom multiprocessing.connection import Listener\n"
        "def work():\n    print(Listener(family='AF_UNIX').address, flush=True)\n    os.kill(os.getpid(), 9)\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\nchild.start()\nchild.join()\n"
        "print(child.pid)\n"
    )
    try:
        argv = [sys.executable, "-c", script, str(folder)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        address, pid = done.stdout.split()
        assert Path(address).parent == folder
        assert (folder / pid).exists()
    finally:
        shutil.rmtree(folder)
