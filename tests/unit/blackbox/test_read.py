"""Reading boxes while they are written, after the writer was killed, and files that are none."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from lockstep.blackbox import layout
from lockstep.blackbox.peers import box_path
from lockstep.blackbox.read import read_all, read_box, read_header
from lockstep.blackbox.snapshot import Op, Snapshot
from tests.unit.blackbox import writers


def wait_until(condition: object, seconds: float = 20.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


@contextmanager
def writer(what: str, folder: Path, rank: int, *words: object) -> Iterator[int]:
    child = writers.start(what, folder, rank, *words)
    try:
        yield child.pid
    finally:
        writers.end(child)


def check(snapshot: Snapshot, distinct: int) -> None:
    """What belongs together in what ``writers.hammer`` writes is together here."""
    assert snapshot.left in (snapshot.entered, snapshot.entered - 1)
    assert (snapshot.op is None) == (snapshot.left == snapshot.entered)
    if snapshot.op is not None:
        assert snapshot.op.seq == snapshot.entered
        check_op(snapshot.op, distinct, complete=True)
    if snapshot.history:
        last = snapshot.history[-1].seq
        assert [op.seq for op in snapshot.history] == list(range(last - len(snapshot.history) + 1, last + 1))
        assert all(a.since <= b.since for a, b in pairwise(snapshot.history))
    for op in snapshot.history:
        check_op(op, distinct, complete=False)
    if snapshot.phase:
        assert snapshot.phase.startswith("phase ")
        assert int(snapshot.phase.split()[1]) < distinct
        assert 0 < snapshot.phase_since <= snapshot.now
    for pace in snapshot.pace:
        assert len(set(pace)) == 1
    paces = [pace[0] for pace in snapshot.pace]
    assert all(b == (a + 1) % 1000 for a, b in pairwise(paces))
    if snapshot.raw is not None:
        number = snapshot.raw.number
        assert snapshot.raw.name == f"raw {number}"
        assert snapshot.raw.site == (f"site {number}" * (number % 5))[:352]
        assert snapshot.raw.since == number


def check_op(op: Op, distinct: int, complete: bool) -> None:
    kind = op.seq % distinct
    assert op.name == f"op {kind}"
    # In the past, a text may be lost; it is never another one's.
    signatures = [f"signature, {kind}, {'x' * (kind % 50)}"] + [""] * (not complete)
    assert op.signature in signatures
    assert writers.__file__ in op.site or not complete
    assert op.since > 0


@pytest.mark.parametrize("distinct", [7, 120, 1000])
def test_no_half_written_record_is_believed(tmp_path: Path, distinct: int) -> None:
    """The last kind has more texts than there is room for: all the time some are replaced."""
    complete = distinct < 500
    path = box_path(tmp_path, 0)
    seen = set()
    inside = 0
    with writer("hammer", tmp_path, 0, distinct):
        began = time.monotonic()
        # Longer where other programs have the cores.
        while (passed := time.monotonic() - began) < 0.5 or (passed < 20 and len(seen) <= 20):
            snapshot = read_box(path, random.choice([1, 8, 64, 256]))
            assert snapshot is not None
            if complete or snapshot.op is None or (snapshot.op.signature and snapshot.op.site):
                check(snapshot, distinct)
            seen.add((snapshot.generation, snapshot.entered))
            inside += snapshot.op is not None
    assert len(seen) > 20
    assert inside > 10


def test_a_writer_killed_at_any_moment_leaves_a_box_that_can_be_read(tmp_path: Path) -> None:
    for attempt in range(10):
        child = writers.start("hammer", tmp_path, 0, 50)
        time.sleep(0.01 + random.random() * 0.05)
        writers.end(child)
        first, second = (read_box(box_path(tmp_path, 0), 256) for _ in range(2))
        assert first is not None, attempt
        assert second is not None
        check(first, 50)
        assert (first.entered, first.history, first.op) == (second.entered, second.history, second.op)


def test_a_killed_rank_is_dead_and_its_last_collective_known(tmp_path: Path) -> None:
    with writer("stay", tmp_path, 1) as pid:
        writers.make(tmp_path, 0)
        mine, other = read_all(tmp_path)
        assert (mine.rank, other.rank) == (0, 1)
        assert (mine.alive, other.alive, other.paused, other.pid) == (True, True, False, pid)
        os.kill(pid, signal.SIGKILL)
        # Nobody has fetched it yet: it is a zombie.
        wait_until(lambda: not read_all(tmp_path)[1].alive)
        assert Path(f"/proc/{pid}").exists()
        assert read_all(tmp_path, alive=False)[1].alive
    mine, other = read_all(tmp_path)
    assert (mine.alive, other.alive, other.paused) == (True, False, False)
    assert other.op is not None
    assert (other.op.name, other.op.signature, other.op.seq) == ("gather", "float32 (2, 3)", 2)
    assert (other.entered, other.left, other.step, other.phase) == (2, 1, 7, "backward")
    assert [op.name for op in other.history] == ["barrier", "gather"]


def test_a_stopped_rank_is_paused(tmp_path: Path) -> None:
    with writer("stay", tmp_path, 0) as pid:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: read_all(tmp_path)[0].paused)
        assert read_all(tmp_path)[0].alive
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not read_all(tmp_path)[0].paused)


def test_a_rank_that_a_debugger_holds_is_paused(tmp_path: Path) -> None:
    seize = 0x4206
    with writer("stay", tmp_path, 0) as pid:
        assert not read_all(tmp_path)[0].paused
        if ctypes.CDLL(None, use_errno=True).ptrace(seize, pid, None, None):
            pytest.skip(f"this process may not trace another: {os.strerror(ctypes.get_errno())}")
        assert (read_all(tmp_path)[0].alive, read_all(tmp_path)[0].paused) == (True, True)


def test_another_process_of_the_same_number_is_not_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.blackbox.processes.started", lambda pid: 12345)
    writers.make(tmp_path)
    monkeypatch.undo()
    assert not read_all(tmp_path)[0].alive


def test_of_a_process_on_another_machine_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "this_machine", lambda: "elsewhere")
    writers.make(tmp_path, pid=2**22)
    monkeypatch.undo()
    assert read_all(tmp_path)[0].alive


@pytest.mark.parametrize("size", [0, 1, 8, layout.HEADER_SIZE, layout.SIZE - 1, layout.SIZE + 1])
def test_a_file_of_another_length_is_no_box(tmp_path: Path, size: int) -> None:
    box = writers.make(tmp_path)
    whole = box.path.read_bytes()
    path = box_path(tmp_path, 1)
    path.write_bytes((whole + b"\0")[:size])
    assert read_box(path) is None
    assert read_header(path) is None
    assert [snapshot.rank for snapshot in read_all(tmp_path)] == [0]


def test_other_files_are_no_boxes(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    whole = box.path.read_bytes()
    path = box_path(tmp_path, 1)
    path.write_bytes(b"\0" * layout.SIZE)
    assert read_box(path) is None
    path.write_bytes(random.Random(0).randbytes(layout.SIZE))
    assert read_box(path) is None
    path.write_bytes(whole[:8] + b"\x63" + whole[9:])  # another version
    assert read_box(path) is None
    path.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])  # a torn header
    assert read_box(path) is None
    path.unlink()
    assert read_box(path) is None
    path.mkdir()
    assert read_box(path) is None
    path.rmdir()
    os.mkfifo(path)
    assert read_box(path) is None  # and does not wait for somebody to write into it
    assert [snapshot.rank for snapshot in read_all(tmp_path)] == [0]
    assert read_all(tmp_path / "nowhere") == []


def test_garbage_behind_a_good_header_raises_nothing(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    box.enter("gather", "float32")
    box.phase("data")
    whole = box.path.read_bytes()
    path = box_path(tmp_path, 1)
    chance = random.Random(0)
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 10, 1000])):
            data[chance.randrange(layout.HEADER_SIZE, layout.SIZE)] = chance.randrange(256)
        path.write_bytes(data)
        read_box(path, 256)
    path.write_bytes(whole[: layout.HEADER_SIZE] + chance.randbytes(layout.SIZE - layout.HEADER_SIZE))
    assert read_box(path) is not None
