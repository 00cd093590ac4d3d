"""Two writers of one folder: on one machine, in containers, on nodes that know nothing of each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import CheckpointError
from lockstep.storage import write_lock
from lockstep.storage.commit import Staging
from lockstep.storage.disk import Disk

WRITER = """
import sys
from pathlib import Path
from lockstep.storage import write_lock
from lockstep.storage.commit import Staging
from lockstep.storage.disk import Disk
from lockstep.errors import CheckpointError
write_lock.HEARTBEAT = 0.05
try:
    staging = Staging(Path(sys.argv[1]), Disk())
    (staging.folder / "file").write_text("first")
    print("writing", flush=True)
    sys.stdin.readline()
    staging.publish()
    staging.close()
    print("published", flush=True)
except CheckpointError as error:
    print(str(error).replace(chr(10), " "), flush=True)
"""
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_lock, "PATIENCE", 0.6)
    monkeypatch.setattr(write_lock, "HEARTBEAT", 0.05)


@contextmanager
def writer(place: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has begun to write to the place."""
    with subprocess.Popen(
        [*command, sys.executable, "-c", WRITER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line and command and process.wait(10):
                pytest.skip(f"{command[0]} cannot make a namespace here: {process.stderr.read()}")  # type: ignore[union-attr]
            assert line == "writing\n", line
            yield process
        finally:
            process.kill()


def let_go(process: subprocess.Popen[str]) -> str:
    """Have the writer continue; what it has to say in the end."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def save(place: Path, text: str = "second") -> None:
    staging = Staging(place, Disk())
    try:
        (staging.folder / "file").write_text(text)
        assert staging.publish() is None
    finally:
        staging.close()


@pytest.mark.parametrize("exists", [False, True])
def test_a_second_writer_is_refused_until_the_first_is_gone(place: Path, exists: bool) -> None:
    if exists:
        save(place, "old")
    with writer(place) as other:
        with pytest.raises(CheckpointError, match=rf"process {other.pid} on .* is writing"):
            Staging(place, Disk())
        other.kill()
        other.wait()
        save(place)  # at once: it is seen that the process has died
    assert (place / "file").read_text() == "second"
    assert os.listdir(place) == ["file"]
    assert os.listdir(place.parent) == ["state"]


def test_two_writers_of_one_process_do_not_pass_each_other(place: Path) -> None:
    held = Staging(place, Disk())
    with pytest.raises(CheckpointError, match="Two writers"):
        Staging(place, Disk())
    held.close()
    Staging(place, Disk()).close()
    assert os.listdir(place.parent) == []


def test_a_writer_can_be_waited_for(place: Path) -> None:
    with writer(place) as other:
        with pytest.raises(CheckpointError, match="is writing"):
            Staging(place, Disk(), wait=0.3)
        assert let_go(other) == "published\n"
        Staging(place, Disk(), wait=5.0).close()


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_is_made_meanwhile_does_not_let_a_second_writer_in(place: Path, exists: bool) -> None:
    """The lock is beside a place that does not exist, and in one that does."""
    with writer(place) as other:
        place.mkdir()
        if exists:
            (place / "mine.txt").write_text("mine")
        with pytest.raises(CheckpointError, match=rf"process {other.pid} on .* is writing"):
            Staging(place, Disk())
        assert let_go(other) == "published\n"
    assert (place / "file").read_text() == "first"
    assert sorted(os.listdir(place)) == ["file", *(["mine.txt"] if exists else [])]
    assert os.listdir(place.parent) == ["state"]


# ---------------------------------------------------------------- writers that cannot be seen


@pytest.mark.usefixtures("quick")
def test_a_writer_in_another_pid_namespace_lives_as_long_as_it_shows_it(place: Path) -> None:
    """Its pid means another process here, or none; host and boot are the same."""
    with writer(place, *CONTAINER) as other:
        with pytest.raises(CheckpointError, match="is writing"):
            Staging(place, Disk())
        time.sleep(1.5 * write_lock.PATIENCE)
        with pytest.raises(CheckpointError, match="is writing"):
            Staging(place, Disk())
        other.kill()
        other.wait()
        save(place)
    assert (place / "file").read_text() == "second"
    assert os.listdir(place.parent) == ["state"]


@pytest.mark.usefixtures("quick")
def test_a_writer_outside_is_not_taken_for_dead_inside_a_container(place: Path) -> None:
    with writer(place) as other:
        inside = subprocess.run(
            [*CONTAINER, sys.executable, "-c", WRITER, str(place)], capture_output=True, text=True, timeout=30, input=""
        )
        if inside.returncode:
            pytest.skip(f"unshare cannot make a namespace here: {inside.stderr}")
        assert f"process {other.pid} on" in inside.stdout
        assert "is writing" in inside.stdout
        assert let_go(other) == "published\n"
    assert (place / "file").read_text() == "first"


def test_another_hostname_does_not_hide_a_process(place: Path) -> None:
    rename = ("unshare", "--uts", "--kill-child", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh")
    with writer(place, *rename) as other:
        with pytest.raises(CheckpointError, match="on elsewhere is writing"):
            Staging(place, Disk())
        os.kill(_child(other.pid), signal.SIGKILL)
        other.wait()
        began = time.monotonic()
        save(place)
        assert time.monotonic() - began < write_lock.HEARTBEAT  # nobody had to wait for a sign of life


def _child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else pid


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("exists", [False, True])
def test_a_writer_that_was_paused_and_taken_over_commits_nothing(place: Path, exists: bool) -> None:
    if exists:
        save(place, "old")
    with writer(place, *CONTAINER) as other:
        paused = _child(other.pid)
        os.kill(paused, signal.SIGSTOP)
        save(place)
        os.kill(paused, signal.SIGCONT)
        answer = let_go(other)
    assert "has lost the right to write" in answer
    assert (place / "file").read_text() == "second"
    assert os.listdir(place) == ["file"]
    assert os.listdir(place.parent) == ["state"]


def _from_elsewhere(path: Path) -> dict[str, Any]:
    """Rewrite a lock as another node's, as if that had the same name; what it says then."""
    owner = {**json.loads(path.read_text()), "boot": "another"}
    path.write_text(json.dumps(owner))
    return owner


@pytest.mark.usefixtures("quick")
def test_a_lock_that_was_taken_over_is_not_committed_under_nor_kept_alive_nor_removed(place: Path) -> None:
    save(place, "old")
    staging = Staging(place, Disk())
    (staging.folder / "file").write_text("new")
    path = place / ".writing"
    path.write_text(json.dumps({**_from_elsewhere(path), "token": "0" * 16, "pid": 77, "host": "far"}))
    os.utime(path, (1, 1))
    time.sleep(4 * write_lock.HEARTBEAT)
    assert path.stat().st_mtime == 1
    with pytest.raises(CheckpointError, match="process 77 on far has taken over"):
        staging.publish()
    staging.close()
    assert (place / "file").read_text() == "old"
    assert sorted(os.listdir(place)) == [".writing", "file"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("ago", [1000.0, 0.0, -1000.0], ids=["long ago", "just now", "in the future"])
def test_a_silent_writer_on_another_node_counts_as_gone(place: Path, ago: float) -> None:
    """By the clock of the file system, not by this machine's: how old its last sign is."""
    held = Staging(place, Disk())
    held._lock._stop.set()
    held._lock._thread.join()
    path = held._lock.path
    _from_elsewhere(path)
    os.utime(path, (time.time() - ago, time.time() - ago))
    began = time.monotonic()
    Staging(place, Disk()).close()
    assert (time.monotonic() - began < write_lock.PATIENCE) == (ago > 0)
    assert os.listdir(place.parent) == []


@pytest.mark.usefixtures("quick")
def test_a_process_of_another_user_may_be_hidden(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid there is no sign of it in /proc: the lock decides."""
    held = Staging(place, Disk())
    owner = json.loads(held._lock.path.read_text())
    hidden = {**owner, "user": os.getuid() + 1, "pid": 2**22 + 1}  # a pid that no process has
    monkeypatch.setattr(os, "getuid", lambda: owner["user"] + 2)
    held._lock.path.write_text(json.dumps(hidden))
    with pytest.raises(CheckpointError, match="is writing"):
        Staging(place, Disk())
    held.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("content", ["", '{"token": 3, "pid": "x", "boot": {}}'])
def test_a_lock_that_says_nothing_goes_after_a_while(place: Path, content: str) -> None:
    place.mkdir()
    (place / ".writing").write_text(content)
    save(place)
    assert os.listdir(place) == ["file"]


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_what_is_no_lock_is_named(place: Path, kind: str) -> None:
    place.mkdir()
    path = place / ".writing"
    {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("/dev/zero")}[kind]()
    with pytest.raises(CheckpointError, match=r"state/\.writing .*[Dd]elete it"):
        Staging(place, Disk())
