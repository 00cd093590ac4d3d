from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch import failure_report
from lockstep.launch.failure_report import Exit, in_words, one_line, render_report
from lockstep.rundir.crash_report import CrashReport
from tests.unit.guard.boxes import box


def words(rank: int, **more: Any) -> CrashReport:
    given = {
        "rank": rank,
        "local_rank": rank,
        "host": "here",
        "pid": 100 + rank,
        "attempt": "",
        "time": 10.0 + rank,
        "kind": "ValueError",
        "message": f"bad value {rank}",
        "traceback": f"Traceback (most recent call last):\n  train.py, line {rank}\nValueError: bad value {rank}\n",
        "line": f"train.py:{rank} in main",
        "follows": False,
        "cause_rank": None,
    }
    return CrashReport(**{**given, **more})


def ended(rank: int, code: int, **more: Any) -> Exit:
    return Exit(rank=rank, code=code, pid=100 + rank, **more)


LOST = {"kind": "RuntimeError", "message": "[gloo] Connection closed by peer", "follows": True}


# --- codes in words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "ended with exit code 3"),
        (139, "ended with exit code 139 (128 + 11: SIGSEGV in a process it started)"),
        (255, "ended with exit code 255"),
        (-signal.SIGSEGV, "segmentation fault: native code touched memory that is not its own (SIGSEGV)"),
        (-signal.SIGTERM, "asked to end (SIGTERM)"),
        (-signal.SIGINT, "interrupted (Ctrl-C) (SIGINT)"),
        (-signal.SIGHUP, "its terminal was closed (SIGHUP)"),
        (-signal.SIGUSR1, "ended by a signal (SIGUSR1)"),
        (-40, "ended by signal 40"),
        (-999, "ended by signal 999"),
    ],
)
def test_codes_and_signals(code: int, text: str) -> None:
    assert in_words(code) == text


@pytest.mark.parametrize("number", sorted(signal.Signals))
def test_every_signal_has_words_and_its_name_once(number: signal.Signals) -> None:
    assert in_words(-number).count(number.name) == 1


def test_killed_for_want_of_memory_is_said_only_when_it_was() -> None:
    assert in_words(-9, out_of_memory=True) == "killed by the operating system, out of memory"
    assert "SIGKILL" in in_words(-9)
    assert in_words(-11, out_of_memory=True) == in_words(-11)


def test_the_kernel_counts_such_kills() -> None:
    kills = failure_report.out_of_memory_kills()
    assert kills is None or kills >= 0


@pytest.mark.parametrize(
    ("said", "code"),
    [({}, 1), ({"kind": "SystemExit", "message": "3"}, 3), ({"kind": "SystemExit", "message": "no data"}, 1)],
)
def test_a_rank_that_had_failed_when_the_launcher_ended_it(tmp_path: Path, said: dict[str, str], code: int) -> None:
    assert (
        render_report([ended(0, 1), ended(1, -15, by_us=True)], [words(0, **LOST), words(1, **said)], logs=tmp_path)[1]
        == code
    )


# --- the report --------------------------------------------------------------------------------------------------


def test_the_first_failure_is_last_and_in_full(tmp_path: Path) -> None:
    exits = [ended(0, 1), ended(1, 1), ended(2, 1), ended(3, -15, by_us=True), ended(4, 0)]
    said = [words(0, **LOST), words(1), words(2, **LOST)]
    text, code = render_report(exits, said, logs=tmp_path)
    assert code == 1
    assert text.endswith("ValueError: bad value 1")
    lines = text.splitlines()
    assert lines[0].startswith("──── lockstep launch: the job failed ─")
    assert f"Output of each rank: {tmp_path}" in lines
    assert "ranks 0, 2: lost the connection to it" in lines
    assert "rank 3: ended by the launcher" in lines
    assert "rank 4: had finished" in lines
    start = next(number for number, line in enumerate(lines) if line.startswith("Rank 1 on "))
    assert lines[start].endswith("(pid 101) failed first, at train.py:1 in main:")
    assert all(line.startswith(("─", "Output", "rank")) for line in lines[: start - 1])
    assert "error_file" not in text


def test_advice_comes_last(tmp_path: Path) -> None:
    text, _ = render_report(
        [ended(0, 1)], [words(0, advice="Out of memory on rank 0.\nHalve the batch.")], logs=tmp_path
    )
    assert text.endswith("ValueError: bad value 0\n\nOut of memory on rank 0.\nHalve the batch.")


def test_a_follower_that_was_told_whom_it_follows(tmp_path: Path) -> None:
    said = [words(0, follows=True, cause_rank=1, kind="PeerFailure"), words(1)]
    text, _ = render_report([ended(0, 1), ended(1, 1)], said, logs=tmp_path)
    assert "rank 0: followed rank 1" in text


def test_an_own_error_of_another_rank_is_one_line(tmp_path: Path) -> None:
    said = [words(0), words(1, message="first line\nsecond line"), words(2, message="y" * 500)]
    text, _ = render_report([ended(0, 1), ended(1, 1), ended(2, 1)], said, logs=tmp_path)
    assert "rank 1: ValueError: first line\n" in text
    assert "second line" not in text
    assert max(len(line) for line in text.splitlines()) < 200


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (1, 1), (-9, 137), (-11, 139), (86, 86)])
def test_the_code_of_the_job_is_the_first_failures(tmp_path: Path, code: int, expected: int) -> None:
    text, found = render_report([ended(0, -15, by_us=True), ended(1, code)], [], logs=tmp_path)
    assert found == expected
    assert "Rank 1 on " in text


def test_without_words_the_end_of_stderr_is_shown(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(100)]
    written = "\n".join(lines).encode() + b"\n 10%\r 20%\rlast \xff\n"
    text, code = render_report([ended(0, -15, by_us=True), ended(1, -11)], [], logs=tmp_path, last_errors={1: written})
    assert code == 139
    assert "failed first: segmentation fault" in text
    assert text.splitlines()[-20:] == ["  line 81", *(f"  line {n}" for n in range(82, 100)), "  last \ufffd"]


def test_an_exit_that_left_nothing(tmp_path: Path) -> None:
    text, _ = render_report([ended(0, 4)], [], logs=tmp_path, last_errors={0: b"\n  \n"})
    assert "ended with exit code 4." in text
    assert text.endswith("look for sys.exit, os._exit or exit() in the script.")
    assert render_report([ended(0, 4)], [], logs=tmp_path / "nowhere")[1] == 4


def test_words_of_an_earlier_job_in_the_same_folder_are_not_this_ones(tmp_path: Path) -> None:
    text, _ = render_report([ended(0, -11)], [words(0, pid=99)], logs=tmp_path)
    assert "ValueError" not in text
    assert "segmentation fault" in text
    assert "segmentation fault" in one_line([ended(0, -11)], [words(0, pid=99)])


def test_killed_ranks_come_before_those_that_lost_them(tmp_path: Path) -> None:
    text, code = render_report([ended(0, 1), ended(1, -9)], [words(0, **LOST)], logs=tmp_path)
    assert code == 137
    assert "rank 0: lost the connection to it" in text
    assert "Rank 1 on" in text
    text, _ = render_report([ended(0, 1), ended(1, -9)], [words(0, **LOST)], logs=tmp_path, out_of_memory=True)
    assert "killed by the operating system, out of memory" in text


def test_the_black_box_shows_what_a_rank_without_words_was_doing(tmp_path: Path) -> None:
    was = {"phase": "forward", "phase_site": "train.py:18", "step": 3, "alive": False}
    exits = [ended(0, -15, by_us=True), ended(1, -9)]
    boxes = [box(0), box(1, pid=101, **was)]
    text, _ = render_report(exits, [], logs=tmp_path, boxes=boxes)
    assert "\nIt was in forward at train.py:18, after step 3." in text
    assert "out-of-memory killer in `dmesg`" in text
    assert one_line(exits, [], boxes).endswith("It was in forward at train.py:18, after step 3.")
    # Not that of another process: an earlier job's, or of a rank that left in good order.
    for other in ({"pid": 99}, {"closed": "finished"}):
        assert (
            "It was" not in render_report(exits, [], logs=tmp_path, boxes=[box(1, **{"pid": 101, **was, **other})])[0]
        )
    # One that raised has its traceback.
    assert "It was" not in render_report([ended(1, 1)], [words(1)], logs=tmp_path, boxes=boxes)[0]


def test_one_line() -> None:
    exits = [ended(0, 1), ended(1, 1)]
    assert one_line(exits, [words(1)]) == "Rank 1 failed at train.py:1 in main: ValueError: bad value 1."
    assert one_line([ended(0, -9)], []).startswith("Rank 0 failed: killed (SIGKILL)")


# --- one line of a message that has several ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("\n\n  Mismatch of shapes.\nrank 0: ...", "DistributedOperationException: Mismatch of shapes."),
        ("Mismatch of shapes.\nrank 0: ...", "DistributedOperationException: Mismatch of shapes."),
        ("\r\n\tMismatch", "DistributedOperationException: Mismatch"),
        ("", "DistributedOperationException"),
        (" \n ", "DistributedOperationException"),
    ],
)
def test_the_first_line_that_says_anything_stands_for_a_message(message: str, line: str) -> None:
    said = [words(0), words(1, kind="DistributedOperationException", message=message)]
    text, _ = render_report([ended(0, 1), ended(1, 1)], said, logs=Path("logs"))
    assert f"\nrank 1: {line}\n" in text
    assert one_line([ended(1, 1)], said[1:]) == f"Rank 1 failed at train.py:1 in main: {line}."


def test_the_rank_that_strayed_stands_before_the_one_that_noticed() -> None:
    lead = "Rank 1 left the loop of train.py:12 and called wait_for_everyone at train.py:30, while rank 0 went on."
    said = [
        words(0, kind="DistributedOperationException", message=f"\n\n{lead}\nCannot apply", lead=lead),
        words(1, kind="PeerFailure", follows=True, cause_rank=0),
    ]
    text, _ = render_report([ended(0, 1), ended(1, 1)], said, logs=Path("logs"))
    first, second, *_ = text.partition("\n\n")[2].splitlines()
    assert first == lead
    assert second == "Rank 0 on here (pid 100) failed first, at train.py:0 in main, where it noticed:"
