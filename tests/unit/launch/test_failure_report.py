from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch import failure_report
from lockstep.launch.failure_report import Exit, how_it_ended, one_line, render_report
from lockstep.rundir.code_frames import CodeFrame
from lockstep.rundir.crash_report import CrashReport
from lockstep.terminal.failure_box import LINES, plain
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


def shown(*args: Any, **more: Any) -> tuple[list[str], int]:
    """The lines between the rules of the box, and the exit code of the job."""
    report = render_report(*args, **more)
    lines = plain(report.box).splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("──── lockstep launch: the job failed ─")
    return lines[1:-1], report.code


def entry(lines: list[str], label: str) -> str:
    """The paragraph with this label, in one line."""
    found = re.search(rf"^{label} +(.*(?:\n {{10}}.*)*)", "\n".join(lines), re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


LOST = {"kind": "RuntimeError", "message": "[gloo] Connection closed by peer", "follows": True}


# --- codes in words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "exited with code 3"),
        (139, "exited with code 139 (128 + 11: SIGSEGV in a process it started)"),
        (255, "exited with code 255"),
        (
            -signal.SIGSEGV,
            "crashed: segmentation fault: native code accessed memory that does not belong to it (SIGSEGV)",
        ),
        (-signal.SIGTERM, "was asked to stop (SIGTERM)"),
        (-signal.SIGINT, "was interrupted (Ctrl-C) (SIGINT)"),
        (-signal.SIGHUP, "lost its terminal (SIGHUP)"),
        (-signal.SIGUSR1, "was ended by a signal (SIGUSR1)"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-40, "was ended by signal 40"),
        (-999, "was ended by signal 999"),
    ],
)
def test_codes_and_signals(code: int, text: str) -> None:
    assert how_it_ended(code) == text


@pytest.mark.parametrize("number", sorted(signal.Signals))
def test_every_signal_has_words_and_its_name_once(number: signal.Signals) -> None:
    assert how_it_ended(-number).count(number.name) == 1


def test_killed_for_want_of_memory_is_reported_only_when_it_was() -> None:
    assert how_it_ended(-9, out_of_memory=True) == "was killed by the operating system (out of memory)"
    assert how_it_ended(-11, out_of_memory=True) == how_it_ended(-11)


def test_the_kernel_counts_such_kills() -> None:
    kills = failure_report.out_of_memory_kills()
    assert kills is None or kills >= 0


@pytest.mark.parametrize(
    ("said", "code"),
    [({}, 1), ({"kind": "SystemExit", "message": "3"}, 3), ({"kind": "SystemExit", "message": "no data"}, 1)],
)
def test_a_rank_that_had_failed_when_the_launcher_ended_it(tmp_path: Path, said: dict[str, str], code: int) -> None:
    exits = [ended(0, 1), ended(1, -15, by_us=True)]
    assert shown(exits, [words(0, **LOST), words(1, **said)], logs=tmp_path)[1] == code


# --- the box -----------------------------------------------------------------------------------------------------


def test_the_first_line_is_the_cause_and_the_others_are_one_line(tmp_path: Path) -> None:
    exits = [ended(0, 1), ended(1, 1), ended(2, 1), ended(3, -15, by_us=True), ended(4, 0)]
    frame = CodeFrame(file="train.py", line=2, function="main", first=1, source=("one", "two", "three"))
    lines, code = shown(exits, [words(0, **LOST), words(1, frames=(frame,)), words(2, **LOST)], logs=tmp_path)
    assert code == 1
    assert lines[0] == "Rank 1 raised ValueError at train.py:1 in main: bad value 1"
    assert lines[2:6] == ["train.py:2 in main", "    1  one", "  ❱ 2  two", "    3  three"]
    assert entry(lines, "Others") == (
        "ranks 0, 2 lost the connection; rank 3 ended by the launcher; rank 4 had finished"
    )
    assert str(tmp_path) in entry(lines, "Logs")
    assert "rank_1.err" in entry(lines, "Logs")


def test_the_same_failure_on_many_ranks_is_one(tmp_path: Path) -> None:
    same = {"message": "no such file", "line": "train.py:3 in main"}
    exits = [ended(rank, 1) for rank in range(8)]
    lines, _ = shown(exits, [words(rank, **same) for rank in range(8)], logs=tmp_path)
    assert lines[0] == "Ranks 0-7 raised ValueError at train.py:3 in main: no such file"
    assert entry(lines, "Others") == ""


def test_cause_and_fix(tmp_path: Path) -> None:
    said = words(
        0, lead="Out of memory on rank 0 (host) at train.py:0.", details="large: x", fix="1. Halve it.\n2. Less."
    )
    lines, _ = shown([ended(0, 1)], [said], logs=tmp_path)
    assert lines[0] == said.lead
    assert lines[2:4] == ["ValueError: bad value 0", "large: x"]
    assert entry(lines, "Fix") == "1. Halve it. 2. Less."


def test_a_follower_that_was_notified(tmp_path: Path) -> None:
    said = [words(0, follows=True, cause_rank=1, kind="PeerFailure"), words(1)]
    lines, _ = shown([ended(0, 1), ended(1, 1)], said, logs=tmp_path)
    assert entry(lines, "Others") == "rank 0 stopped because of it"


def test_an_own_error_of_another_rank_is_short(tmp_path: Path) -> None:
    said = [words(0), words(1, message="first line\nsecond line"), words(2, message="y" * 500)]
    lines, _ = shown([ended(0, 1), ended(1, 1), ended(2, 1)], said, logs=tmp_path)
    assert "rank 1 raised ValueError at train.py:1 in main: first line;" in entry(lines, "Others")
    assert "second line" not in "\n".join(lines)
    assert len(entry(lines, "Others")) < 200


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (1, 1), (-9, 137), (-11, 139), (86, 86)])
def test_the_code_of_the_job_is_the_first_failures(tmp_path: Path, code: int, expected: int) -> None:
    lines, found = shown([ended(0, -15, by_us=True), ended(1, code)], [], logs=tmp_path)
    assert found == expected
    assert lines[0].startswith("Rank 1 ")


def test_without_a_report_the_end_of_stderr_is_shown(tmp_path: Path) -> None:
    last = [f"line {number}" for number in range(100)]
    written = "\n".join(last).encode() + b"\n 10%\r 20%\rlast \xff\n"
    lines, code = shown([ended(0, -15, by_us=True), ended(1, -11)], [], logs=tmp_path, last_errors={1: written})
    assert code == 139
    assert lines[0].startswith("Rank 1 crashed: segmentation fault")
    start = lines.index("The last lines it wrote to stderr:")
    assert lines[start + 1 : start + 13] == [*(f"  line {n}" for n in range(89, 100)), "  last \ufffd"]


def test_an_exit_that_left_nothing(tmp_path: Path) -> None:
    lines, _ = shown([ended(0, 4)], [], logs=tmp_path, last_errors={0: b"\n  \n"})
    assert lines[0] == "Rank 0 exited with code 4."
    assert "os._exit()" in entry(lines, "Fix")
    assert shown([ended(0, 4)], [], logs=tmp_path / "nowhere")[1] == 4


def test_a_report_of_an_earlier_job_in_the_same_folder_is_not_this_ones(tmp_path: Path) -> None:
    lines, _ = shown([ended(0, -11)], [words(0, pid=99)], logs=tmp_path)
    assert "ValueError" not in "\n".join(lines)
    assert "segmentation fault" in lines[0]
    assert "segmentation fault" in one_line([ended(0, -11)], [words(0, pid=99)])


def test_killed_ranks_come_before_those_that_lost_them(tmp_path: Path) -> None:
    exits = [ended(0, 1), ended(1, -9)]
    lines, code = shown(exits, [words(0, **LOST)], logs=tmp_path)
    assert code == 137
    assert lines[0].startswith("Rank 1 was killed by SIGKILL")
    assert entry(lines, "Others") == "rank 0 lost the connection"
    lines, _ = shown(exits, [words(0, **LOST)], logs=tmp_path, out_of_memory=True)
    assert lines[0].startswith("Rank 1 was killed by the operating system (out of memory)")


def test_the_black_box_shows_what_a_rank_without_a_report_was_doing(tmp_path: Path) -> None:
    was = {"phase": "forward", "phase_site": "train.py:18", "step": 3, "alive": False}
    exits = [ended(0, -15, by_us=True), ended(1, -9)]
    boxes = [box(0), box(1, pid=101, **was)]
    lines, _ = shown(exits, [], logs=tmp_path, boxes=boxes)
    assert lines[0] == "Rank 1 was killed by SIGKILL, in forward at train.py:18, after step 3."
    assert any("Its process was 101 on " in line for line in lines)
    assert "out-of-memory killer in `dmesg`" in entry(lines, "Fix")
    assert one_line(exits, [], boxes) == lines[0]
    # Not that of another process: an earlier job's, or of a rank that left in good order.
    for other in ({"pid": 99}, {"closed": "finished"}):
        found, _ = shown(exits, [], logs=tmp_path, boxes=[box(1, **{"pid": 101, **was, **other})])
        assert "in forward" not in "\n".join(found)
    # One that raised has its own lines.
    assert "in forward" not in "\n".join(shown([ended(1, 1)], [words(1)], logs=tmp_path, boxes=boxes)[0])


def test_the_node_is_named_where_there_are_several(tmp_path: Path) -> None:
    lines, _ = shown([ended(5, 1)], [words(5, node=1, host="gpu-b")], logs=tmp_path)
    assert lines[0].startswith("Rank 5 on node 1 (gpu-b) raised ValueError at ")
    boxes = [box(5, pid=105, alive=False)]
    lines, _ = shown([ended(5, -9)], [], logs=tmp_path, boxes=boxes, nodes=2)
    assert lines[0].startswith(f"Rank 5 on node {boxes[0].node} ({boxes[0].host}) was killed by SIGKILL")


def test_one_line() -> None:
    exits = [ended(0, 1), ended(1, 1)]
    assert one_line(exits, [words(1)]) == "Rank 1 raised ValueError at train.py:1 in main: bad value 1."
    assert one_line([ended(0, -9)], []) == "Rank 0 was killed by SIGKILL."


@pytest.mark.parametrize(
    ("message", "end"),
    [
        ("\n\n  Mismatch of shapes.\nrank 0: ...", ": Mismatch of shapes"),
        ("\r\n\tMismatch", ": Mismatch"),
        ("", ""),
        (" \n ", ""),
    ],
)
def test_the_first_line_that_has_a_text_stands_for_a_message(message: str, end: str) -> None:
    said = [words(0), words(1, message=message)]
    lines, _ = shown([ended(0, 1), ended(1, 1)], said, logs=Path("logs"))
    assert entry(lines, "Others").rstrip(".") == f"rank 1 raised ValueError at train.py:1 in main{end}"
    assert one_line([ended(1, 1)], said[1:]) == f"Rank 1 raised ValueError at train.py:1 in main{end}."


def test_the_rank_that_strayed_stands_before_the_one_that_noticed() -> None:
    lead = "Rank 1 left the loop of train.py:12 and called wait_for_everyone at train.py:30."
    message = f"\n\n{lead}\nCannot apply\n\nLikely cause: a break.\nFix: stop together."
    said = [
        words(
            0, kind="DistributedOperationException", message=message, lead=lead, cause="a break.", fix="stop together."
        ),
        words(1, kind="PeerFailure", follows=True, cause_rank=0),
    ]
    lines, _ = shown([ended(0, 1), ended(1, 1)], said, logs=Path("logs"))
    assert lines[0] == lead
    assert "\n".join(lines).count(lead) == 1
    assert "Cannot apply" in lines
    assert entry(lines, "Seen by") == "rank 0, at train.py:0 in main"
    assert (entry(lines, "Cause"), entry(lines, "Fix")) == ("a break.", "stop together.")
