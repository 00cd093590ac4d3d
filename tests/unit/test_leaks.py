"""The check that every test goes through (tests/conftest.py) sees each kind of leftover, and only leftovers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.leaks import Snapshot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_a_clean_process_leaves_nothing(folder: Path) -> None:
    before = Snapshot.take(folder)
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert before.left_behind() == []


@pytest.mark.parametrize("daemon", [True, False])
def test_a_running_thread_is_named(folder: Path, daemon: bool) -> None:
    before, stop = Snapshot.take(folder), threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten", daemon=daemon)
    thread.start()
    try:
        (line,) = before.left_behind(grace=0.05)
        assert "forgotten" in line
        assert ("daemon" in line) is daemon
    finally:
        stop.set()
        thread.join()


def test_a_thread_that_is_about_to_end_gets_a_moment(folder: Path) -> None:
    before = Snapshot.take(folder)
    timer = threading.Timer(0.1, lambda: None)
    timer.start()
    assert before.left_behind(grace=10) == []


def test_a_pool_and_a_thread_from_before_may_stay(folder: Path) -> None:
    stop = threading.Event()
    old = threading.Thread(target=stop.wait, name="old")
    old.start()
    before = Snapshot.take(folder)
    pool = threading.Thread(target=stop.wait, name="lockstep-pool-reader")
    pool.start()
    try:
        assert before.left_behind(grace=0) == []
    finally:
        stop.set()
        pool.join()
        old.join()


def test_an_open_descriptor_is_named(folder: Path) -> None:
    before = Snapshot.take(folder)
    ends = os.pipe()
    try:
        left = before.left_behind(grace=0)
        assert [line.partition(": pipe:")[0] for line in left] == [f"descriptor {end}" for end in ends]
    finally:
        for end in ends:
            os.close(end)
    assert before.left_behind() == []


def test_a_descriptor_whose_owner_is_collected_is_not(folder: Path) -> None:
    class Owner:
        def __init__(self) -> None:
            self.me, self.file = self, os.open(folder, os.O_RDONLY)

        def __del__(self) -> None:
            os.close(self.file)

    before = Snapshot.take(folder)
    Owner()
    assert before.left_behind() == []


def test_variables_are_named_and_put_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKS_GONE", "1")
    monkeypatch.setenv("LEAKS_CHANGED", "1")
    before = Snapshot.take(folder)
    os.environ["LEAKS_NEW"] = "1"
    os.environ["LEAKS_CHANGED"] = "2"
    del os.environ["LEAKS_GONE"]
    assert before.left_behind() == [
        "environment variable LEAKS_CHANGED: changed",
        "environment variable LEAKS_GONE: removed",
        "environment variable LEAKS_NEW: added",
    ]
    assert before.left_behind() == []


def test_a_file_at_the_top_of_a_watched_folder_is_named(folder: Path) -> None:
    (folder / "was-here").touch()
    before = Snapshot.take(folder)
    (folder / "stray.pt").touch()
    (folder / "__pycache__").mkdir()
    assert before.left_behind() == [f"file {folder / 'stray.pt'}"]


def test_the_working_directory_is_watched_and_put_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "start").mkdir()
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "start")
    before = Snapshot.take()
    Path("stray.pt").touch()
    os.chdir(folder / "elsewhere")
    left = before.left_behind()
    assert left == [f"the working directory: now {folder / 'elsewhere'}", f"file {folder / 'start' / 'stray.pt'}"]
    assert os.getcwd() == str(folder / "start")


def test_an_initialised_process_group_is_named_and_destroyed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the group wraps it and does not unwrap it
    before = Snapshot.take(folder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert before.left_behind() == ["the default process group: still initialised"]
    assert not dist.is_initialized()


def test_a_test_that_leaves_something_fails(folder: Path) -> None:
    (folder / "tests").mkdir()
    here = Path(__file__).parent.parent
    for name in ("__init__.py", "conftest.py", "durations.py", "leaks.py"):
        (folder / "tests" / name).write_text((here / name).read_text())
    (folder / "tests" / "test_sample.py").write_text(
        "import os\n"
        "def test_clean(monkeypatch): monkeypatch.setenv('SAMPLE', '1')\n"
        "def test_careless(): os.environ['SAMPLE'] = '1'\n"
        "def test_after(): assert 'SAMPLE' not in os.environ\n"
    )
    (folder / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", "tests"]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    child = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 1, child.stdout + child.stderr
    assert "environment variable SAMPLE: added" in child.stdout
    assert "3 passed, 1 error" in child.stdout


def test_a_child_process_finds_lockstep_and_the_tests() -> None:
    check = f"import importlib.util as u; assert u.find_spec('lockstep') and u.find_spec({__name__!r})"
    child = subprocess.run([sys.executable, "-c", check], cwd="/", capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
