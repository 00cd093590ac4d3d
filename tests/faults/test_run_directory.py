"""A run directory that fails while a job runs, or before: the job ends as it would have, and says what is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.faults.jobs import LIMIT, Job

MOUNT = """
mount -t tmpfs -o "size=$1" none "$2" || exit
test "$3" != before || head -c 1G /dev/zero > "$2/filler" 2> /dev/null
shift 3 && exec "$@"
"""
LINES = 40


class Started:
    """A job whose run directory is on a small disk of its own, which only the job sees."""

    def __init__(self, process: subprocess.Popen[str], disk: Path, screen: Path, go: Path) -> None:
        self._process, self._screen, self._go = process, screen, go
        self.disk = Path(f"/proc/{process.pid}/root{disk}")
        """The disk, as it is seen from here."""

    def await_text(self, text: str) -> None:
        deadline = time.monotonic() + LIMIT
        while text not in self._screen.read_text():
            assert self._process.poll() is None, self._screen.read_text()
            assert time.monotonic() < deadline, self._screen.read_text()
            time.sleep(0.05)

    def fill(self) -> None:
        """Leave no byte free."""
        with open(self.disk / "filler", "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert not os.statvfs(self.disk).f_bavail

    def finish(self) -> tuple[int, str]:
        """Let it go on; its exit code, and its screen."""
        self._go.touch()
        code = self._process.wait(LIMIT)
        return code, self._screen.read_text()


@contextmanager
def started(folder: Path, scenario: str, size: str, full: str = "") -> Iterator[Started]:
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root, to be mounted")
    disk, screen, go = folder / "disk", folder / "screen", folder / "go"
    disk.mkdir()
    job = Job(script="writing.py", scenario=scenario)
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(disk / "run"), "LOCKSTEP_TEST_GO": str(go), "OMP_NUM_THREADS": "1"}
    mount = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNT, "sh", size, str(disk), full]
    argv = [*mount, *job.command]
    with open(screen, "wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file, text=True, env=environ, start_new_session=True)
    try:
        yield Started(process, disk, screen, go)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def assert_done(code: int, text: str) -> None:
    assert code == 0, text
    assert "all done" in text, text
    assert len(re.findall(r"^step \d+ of rank", text, re.MULTILINE)) == LINES, text


def test_a_disk_that_fills_up_under_a_job_that_fails(tmp_path: Path) -> None:
    """The report has no words to read, and still names the failure."""
    with started(tmp_path, "raises", "4m") as job:
        job.await_text("under way")
        private(job.disk / "run")
        job.fill()
        code, text = job.finish()
    assert code == 1, text
    assert len(re.findall(r"^step \d+ of rank", text, re.MULTILINE)) == LINES, text
    assert text.count("are incomplete (No space left on device)") == 1, text
    report = text.partition("the job failed")[2]
    assert re.search(r"Rank 1 exited with code 1[.,]", report), text
    assert "ValueError: of rank 1" in report, text
    assert "SIGBUS" not in text, text


def private(folder: Path) -> None:
    """Nobody else may read or write anything in it."""
    paths = [folder, *folder.rglob("*")]
    assert folder / "boxes" / "rank_1.box" in paths
    assert not [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077], paths


@pytest.mark.soak
def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    with started(tmp_path, "fill", "4m") as job:
        job.await_text("under way")
        job.fill()
        code, text = job.finish()
    assert_done(code, text)
    assert text.count("are incomplete (No space left on device)") == 1, text


@pytest.mark.soak
@pytest.mark.parametrize("size", ["80k", "300k"])
def test_a_disk_without_room_for_black_boxes(tmp_path: Path, size: str) -> None:
    """For any of them, or for one of the two."""
    with started(tmp_path, "before", size) as job:
        code, text = job.finish()
    assert_done(code, text)
    said = re.findall(r"lockstep guard: rank \d has no black box: .*No space left on device.*The job continues", text)
    assert len(said) == 1, text


@pytest.mark.soak
def test_a_disk_that_is_full_before(tmp_path: Path) -> None:
    with started(tmp_path, "before", "80k", full="before") as job:
        code, text = job.finish()
    assert_done(code, text)
    assert "The run directory could not be made" in text, text
    (place,) = re.findall(r"so it is (\S+) this time", text)
    shutil.rmtree(place)


def test_a_run_directory_that_is_removed(tmp_path: Path) -> None:
    with started(tmp_path, "remove", "4m") as job:
        job.await_text("under way")
        time.sleep(1.5)  # the guard has seen the boxes
        shutil.rmtree(job.disk / "run")
        job.await_text("black box of ranks 0-1 was removed")
        code, text = job.finish()
    assert_done(code, text)
    assert text.count("was removed from") == 1, text
    assert text.count("are incomplete (removed by somebody)") == 1, text


@pytest.mark.soak
def test_a_failure_after_it_was_removed_is_reported(tmp_path: Path) -> None:
    with started(tmp_path, "raises", "4m") as job:
        job.await_text("under way")
        shutil.rmtree(job.disk / "run")
        code, text = job.finish()
    assert code == 1, text
    assert "ValueError: of rank 1" in text.partition("the job failed")[2], text
