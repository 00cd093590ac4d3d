from __future__ import annotations

import contextlib
import os
import random
import re
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.launch import output as module
from lockstep.launch.output import Output, name_ranks
from tests.leaks import descriptors

LIMIT = 20.0


class Screen:
    """A pipe or terminal in the place of one of the launcher's streams, and what has come out of it."""

    def __init__(self, *, terminal: bool = False) -> None:
        if terminal:
            with open(os.devnull) as sizeless:
                self.reader, self.writer = module._terminal(sizeless.fileno())
        else:
            self.reader, self.writer = os.pipe()
        self.file = os.fdopen(self.writer, "w", closefd=True)
        self._data = bytearray()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self.reader, 1 << 16):
                self._data += data

    @property
    def text(self) -> bytes:
        return bytes(self._data)

    def wait_for(self, text: bytes) -> None:
        deadline = time.monotonic() + LIMIT
        while text not in self._data:
            assert time.monotonic() < deadline, f"{text!r} has not come; there is {self.text[-500:]!r}"
            time.sleep(0.005)

    def close(self) -> bytes:
        self.file.close()
        self._thread.join(LIMIT)
        os.close(self.reader)
        return self.text


class Job:
    """An Output between writers in this process and two screens."""

    def __init__(self, folder: Path, ranks: int, *, terminal: bool = False, **options: object) -> None:
        self.folder = folder
        self.screens = {"out": Screen(terminal=terminal), "err": Screen(terminal=terminal)}
        self.closed = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", self.screens["out"].file)
            patch.setattr(sys, "stderr", self.screens["err"].file)
            self.output = Output(**options)  # type: ignore[arg-type]
        self.writers: dict[tuple[int, str], int] = {}
        self.start(ranks)

    def start(self, ranks: int, folder: Path | None = None) -> None:
        """The ranks get copies of the streams, as processes do."""
        for rank in range(ranks):
            for name, end in self.output.open(rank, folder or self.folder).items():
                self.writers[rank, name] = os.dup(end)
        self.output.started()

    def write(self, rank: int, text: bytes, name: str = "out") -> None:
        rest = memoryview(text)
        while rest:
            rest = rest[os.write(self.writers[rank, name], rest) :]

    def end(self, rank: int) -> None:
        for name in ("out", "err"):
            os.close(self.writers.pop((rank, name)))

    def close(self) -> tuple[bytes, bytes]:
        """What was on both screens."""
        for end in self.writers.values():
            os.close(end)
        self.writers.clear()
        self.closed = True
        self.output.close()
        return self.screens["out"].close(), self.screens["err"].close()

    def kept(self, rank: int, name: str = "out") -> bytes:
        return (self.folder / f"rank_{rank}.{name}").read_bytes()


@contextlib.contextmanager
def running(folder: Path, ranks: int, **options: object) -> Iterator[Job]:
    job = Job(folder, ranks, **options)  # type: ignore[arg-type]
    try:
        yield job
    finally:
        if not job.closed:
            job.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with contextlib.ExitStack() as stack:
        yield lambda ranks, **options: stack.enter_context(running(tmp_path / "logs", ranks, **options))


# --- lines in one piece ------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 5), prefix=st.sampled_from(["0", "3"]))
def test_lines_of_many_writers_stay_whole(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ranks: int, prefix: str
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    chance = random.Random(seed)
    sent = {}
    for rank in range(ranks):
        lines = [
            f"<{rank}.{number} {'x' * chance.choice([0, 3, 80, 5000])}>\n".encode()
            for number in range(chance.randint(1, 40))
        ]
        sent[rank] = b"".join(lines)

    with pytest.MonkeyPatch.context() as patch, running(folder, ranks, prefix=prefix) as job:
        patch.setattr(module, "PATIENCE", 3600.0)  # a writer may have to wait in the middle of a line

        def write(rank: int) -> None:
            mine = random.Random(seed + rank)
            start = 0
            while start < len(sent[rank]):
                size = mine.choice([1, 7, 100, 5000, 70_000])
                job.write(rank, sent[rank][start : start + size])
                start += size

        threads = [threading.Thread(target=write, args=[rank]) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        out, _ = job.close()
    for rank in range(ranks):
        assert job.kept(rank) == sent[rank]
        mark = f"[rank {rank}] ".encode() if prefix == "3" else b""
        shown = [line for line in out.splitlines(keepends=True) if line.startswith(mark + f"<{rank}.".encode())]
        assert b"".join(line.removeprefix(mark) for line in shown) == sent[rank]
    marks = (len("[rank 0] ") if prefix == "3" else 0) * out.count(b"\n")
    assert len(out) == sum(map(len, sent.values())) + marks


def test_streams_are_kept_apart(start: Callable[..., Job]) -> None:
    job = start(2)
    job.write(0, b"to out\n")
    job.write(0, b"to err\n", "err")
    assert job.close() == (b"to out\n", b"to err\n")
    assert (job.kept(0), job.kept(0, "err"), job.kept(1)) == (b"to out\n", b"to err\n", b"")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_line_without_an_end(start: Callable[..., Job], ranks: int) -> None:
    job = start(ranks)
    job.write(0, b"no end")
    job.end(0)
    job.screens["out"].wait_for(b"no end")
    out, _ = job.close()
    # Of several ranks, what the launcher says next must not continue the line.
    assert out == (b"no end" if ranks == 1 else b"no end\n")
    assert job.kept(0) == b"no end"


def test_an_unfinished_line_does_not_swallow_anothers(start: Callable[..., Job]) -> None:
    job = start(2, prefix="1")
    job.write(0, b"half")
    job.screens["out"].wait_for(b"half")
    job.write(1, b"whole\n")
    job.screens["out"].wait_for(b"whole")
    job.write(0, b" other half\n")
    out, _ = job.close()
    assert out == b"[rank 0] half\n[rank 1] whole\n[rank 0]  other half\n"
    assert job.kept(0) == b"half other half\n"


def test_one_rank_is_shown_as_it_comes(start: Callable[..., Job]) -> None:
    job = start(1)
    for piece in (b"name? ", b"\x1b[31m", b"\xff\xfe\x00", b"\r 10%", b"\n"):
        job.write(0, piece)
        job.screens["out"].wait_for(piece)
    assert job.close()[0] == job.kept(0) == b"name? \x1b[31m\xff\xfe\x00\r 10%\n"


def test_one_rank_with_its_number(start: Callable[..., Job]) -> None:
    job = start(1, prefix="3")
    for piece in (b"a", b"b\nc", b"\n"):
        job.write(0, piece)
        job.screens["out"].wait_for(piece[-1:])
    job.write(0, b"d\n", "err")
    assert job.close() == (b"[rank 0] ab\n[rank 0] c\n", b"[rank 0] d\n")


@pytest.mark.parametrize(("prefix", "out", "err"), [("1", b"[rank 0] ", b""), ("2", b"", b"[rank 0] ")])
def test_which_streams_carry_the_rank(start: Callable[..., Job], prefix: str, out: bytes, err: bytes) -> None:
    job = start(2, prefix=prefix)
    job.write(0, b"x\n")
    job.write(0, b"y\n", "err")
    assert job.close() == (out + b"x\n", err + b"y\n")


def test_bars_pass_at_once(start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 3600.0)
    job = start(2)
    for percent in (b"\r 1%", b"\r 2%", b"\r 3%"):
        job.write(0, percent)
        job.screens["out"].wait_for(percent)
    # Another rank's bar takes the same line.
    job.write(1, b"\r 9%")
    job.screens["out"].wait_for(b"9%")
    job.write(1, b"plain\n")
    out, _ = job.close()
    assert out.startswith(b"\r 1%\r 2%\r 3%\r 9%")
    assert out.endswith(b"plain\n")


def test_garbage_is_passed_on_byte_for_byte(start: Callable[..., Job]) -> None:
    garbage = random.Random(1).randbytes(300_000)
    job = start(2)
    job.write(0, garbage)
    job.write(0, b"\n")
    assert job.close()[0] == garbage + b"\n"
    assert job.kept(0) == garbage + b"\n"


def test_a_huge_line(start: Callable[..., Job]) -> None:
    job = start(2)
    size = 30_000_000
    job.write(0, b"x" * size)
    job.write(0, b"\n")
    assert job.close()[0].count(b"x") == size
    assert len(job.kept(0)) == size + 1


def test_nothing_at_all(start: Callable[..., Job]) -> None:
    assert start(3).close() == (b"", b"")


def test_flush_shows_what_was_written_before(start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 3600.0)
    monkeypatch.setattr(module, "GATHERING", 3600.0)
    job = start(3, collapse=True)
    job.write(0, b"line\n")
    job.write(1, b"part")
    job.output.flush(LIMIT)
    job.screens["out"].wait_for(b"part")
    assert job.screens["out"].text == b"[rank 0] line\npart"


# --- terminals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_a_terminal_have_terminals(start: Callable[..., Job], ranks: int) -> None:
    job = start(ranks, terminal=True)
    assert all(os.isatty(end) for end in job.writers.values())
    job.write(0, b"line\n\r 5%\r10%\n")
    job.screens["out"].wait_for(b"10%\n")
    assert job.screens["out"].text == b"line\n\r 5%\r10%\n"
    job.close()
    assert job.kept(0) == b"line\n\r 5%\r10%\n"


def test_without_terminals_left_there_are_pipes(start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(screen: int) -> tuple[int, int]:
        raise OSError("out of pty devices")

    job = start(1, terminal=True)
    monkeypatch.setattr(module, "_terminal", none)
    job.end(0)
    job.start(1)
    assert not os.isatty(job.writers[0, "out"])
    job.write(0, b"still\n")
    job.screens["out"].wait_for(b"still\n")


# --- collapsing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([5, 1, 0, 2], "ranks 0-2, 5"),
        ([7, 0, 4, 6], "ranks 0, 4, 6-7"),
    ],
)
def test_names_of_ranks(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


def test_what_all_print_is_shown_once(start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATHERING", 3600.0)
    job = start(6, collapse=True)
    for rank in (2, 0, 1, 5):
        job.write(rank, b"some\n")
    for rank in range(6):
        job.write(rank, b"all\n")
    job.write(4, b"mine\n")
    out, _ = job.close()
    assert out == b"[ranks 0-2, 5] some\nall\n[rank 4] mine\n"
    assert job.kept(3) == b"all\n"


def test_collapsed_lines_do_not_wait_for_ever(start: Callable[..., Job]) -> None:
    job = start(2, collapse=True)
    job.write(1, b"only me\n")
    job.screens["out"].wait_for(b"[rank 1] only me\n")


def test_a_rank_that_has_ended_still_counts(start: Callable[..., Job]) -> None:
    job = start(3, collapse=True)
    job.end(2)
    for rank in (0, 1):
        job.write(rank, b"two of three\n")
    assert job.close()[0] == b"[ranks 0-1] two of three\n"


def test_what_one_rank_repeats_is_not_collapsed(start: Callable[..., Job]) -> None:
    job = start(2, collapse=True)
    for rank in (0, 1):
        job.write(rank, b"again\n" * 3)
    assert job.close()[0] == b"again\n" * 3


def test_last_lines_without_an_end_are_collapsed_too(start: Callable[..., Job]) -> None:
    job = start(2, collapse=True)
    for rank in (0, 1):
        job.write(rank, b"done")
    for rank in (0, 1):
        job.end(rank)
    assert job.close()[0] == b"done\n"


def test_bars_are_not_collapsed(start: Callable[..., Job]) -> None:
    job = start(2, collapse=True)
    for rank in (0, 1):
        job.write(rank, b"\r50%")
    job.screens["out"].wait_for(b"\r50%\r50%")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n"]), max_size=12), min_size=2, max_size=4),
    seed=st.integers(0, 1000),
)
def test_collapsing_keeps_each_ranks_order(
    tmp_path_factory: pytest.TempPathFactory, lines: list[list[bytes]], seed: int
) -> None:
    with running(tmp_path_factory.mktemp("logs"), len(lines), collapse=True) as job:
        left = {rank: list(own) for rank, own in enumerate(lines)}
        chance = random.Random(seed)
        while any(left.values()):
            rank = chance.choice([rank for rank, own in left.items() if own])
            job.write(rank, left[rank].pop(0))
        out, _ = job.close()
    seen: dict[int, list[bytes]] = {rank: [] for rank in range(len(lines))}
    for line in out.splitlines(keepends=True):
        ranks = list(seen)
        if match := re.match(rb"\[ranks? ([^\]]*)\] ", line):
            line = line[match.end() :]
            ranks = []
            for part in match[1].decode().split(", "):
                low, _, high = part.partition("-")
                ranks += range(int(low), int(high or low) + 1)
        for rank in ranks:
            seen[rank].append(line)
    assert list(seen.values()) == lines


def test_collapsing_many_lines_takes_no_time(start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 3600.0)
    job = start(2, collapse=True)
    text = b"".join(f"{number % 5000}\n".encode() for number in range(60_000))
    threads = [threading.Thread(target=job.write, args=[rank, text]) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    out, _ = job.close()
    both = sum(1 for line in out.splitlines() if not line.startswith(b"["))
    assert 2 * both + (out.count(b"\n") - both) == 120_000


# --- when something fails ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_does_not_stop_the_job(start: Callable[..., Job], tmp_path: Path, ranks: int) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "rank_0.out").symlink_to("/dev/full")
    job = start(0)
    job.start(ranks, full)
    for _ in range(3):
        job.write(0, b"x\n")
        job.output.flush(LIMIT)
    out, err = job.close()
    assert out == b"x\n" * 3
    assert err.decode() == (
        f"lockstep launch: the log files in {full} are incomplete (No space left on device): what ranks print is shown "
        "here only. The job continues.\n"
    )


def test_a_folder_that_cannot_be_made(start: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = start(0)
    job.start(2, tmp_path / "file" / "logs")
    job.write(1, b"shown\n")
    out, err = job.close()
    assert out == b"shown\n"
    assert err.count(b"are incomplete (File exists)") == 1


def test_log_files_that_are_removed(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(2)
    job.write(0, b"first\n")
    job.screens["out"].wait_for(b"first\n")
    for path in job.folder.iterdir():
        path.unlink()
    for _ in range(3):
        job.write(1, b"shown\n")
        job.output.flush(LIMIT)
    out, err = job.close()
    assert out == b"first\n" + b"shown\n" * 3
    assert err.count(b"are incomplete (removed by somebody)") == 1


def test_log_files_are_for_their_owner_only(start: Callable[..., Job], tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        job = start(0)
        job.start(1, tmp_path / "run" / "logs")
        job.close()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "run", *sorted((tmp_path / "run").rglob("*"))]]
    assert modes == [0o700, 0o700, 0o600, 0o600]


def test_a_reader_that_goes_away(start: Callable[..., Job]) -> None:
    job = start(2)
    job.write(0, b"first\n")
    job.screens["out"].wait_for(b"first\n")
    # What `| head -1` does: the reader of stdout leaves.
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, job.screens["out"].writer)
    os.close(writer)
    text = b"x" * 10_000 + b"\n"
    for _ in range(50):
        job.write(0, text)
        job.write(1, b"to err\n", "err")
    _, err = job.close()
    assert err.count(b"nobody reads stdout any more") == 1
    assert err.count(b"to err\n") == 50
    assert job.kept(0) == b"first\n" + text * 50


def test_a_screen_that_does_not_block(start: Callable[..., Job]) -> None:
    job = start(2)
    os.set_blocking(job.screens["out"].writer, False)
    size = 3_000_000
    job.write(0, b"y" * size + b"\n")
    assert job.close()[0] == b"y" * size + b"\n"


def test_without_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    output = Output()
    ends = output.open(0, tmp_path)
    os.write(ends["out"], b"kept\n")
    output.close()
    assert (tmp_path / "rank_0.out").read_bytes() == b"kept\n"


def test_what_still_prints_does_not_keep_us(start: Callable[..., Job]) -> None:
    job = start(2)
    stop = threading.Event()
    end = job.writers.pop((0, "out"))

    def print_for_ever() -> None:
        # As a process that a rank has left behind, with the rank's stdout.
        os.set_blocking(end, False)
        with contextlib.suppress(BrokenPipeError):
            while not stop.wait(0.0005):
                with contextlib.suppress(BlockingIOError):
                    os.write(end, b"still here\n" * 1000)

    thread = threading.Thread(target=print_for_ever)
    thread.start()
    job.screens["out"].wait_for(b"still here\n")
    closing = threading.Thread(target=job.close)
    closing.start()
    closing.join(LIMIT)
    stuck = closing.is_alive()
    stop.set()
    thread.join()
    closing.join()
    os.close(end)
    assert not stuck


@pytest.mark.parametrize("terminal", [False, True])
def test_restarts_leave_no_files_open(start: Callable[..., Job], tmp_path: Path, terminal: bool) -> None:
    job = start(3, terminal=terminal)
    job.output.flush(LIMIT)
    before = len(descriptors())
    for attempt in range(1, 20):
        for rank in range(3):
            job.write(rank, f"attempt {attempt}\n".encode())
            job.end(rank)
        job.start(3, tmp_path / f"attempt_{attempt}")
    deadline = time.monotonic() + LIMIT
    while len(descriptors()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(descriptors()) <= before  # fewer when something of an earlier test has been collected
    for screen in job.screens.values():
        assert not select.select([screen.writer], [], [], 0)[0] or terminal
    job.close()


def test_opening_while_others_print(start: Callable[..., Job], tmp_path: Path) -> None:
    """The thread reads while more streams are opened, as at the start of many ranks."""
    job = start(1)
    stop = threading.Event()

    def chatter() -> None:
        while not stop.is_set():
            job.write(0, b"z\nrest")

    thread = threading.Thread(target=chatter)
    thread.start()
    for attempt in range(30):
        for rank in range(1, 9):
            for end in job.output.open(rank, tmp_path / str(attempt)).values():
                os.close(os.dup(end))
        job.output.started()
    stop.set()
    thread.join(LIMIT)
    assert job.output._thread.is_alive()
