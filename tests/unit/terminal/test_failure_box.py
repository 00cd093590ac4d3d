"""The failure screen: its size, whatever it is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.rundir.code_frames import CodeFrame
from lockstep.rundir.printable import uncoloured
from lockstep.terminal.failure_box import LINES, Entry, FailureBox, plain
from lockstep.terminal.show import draw, encodable, render


def frame(line: int = 5, lines: int = 9, **more: object) -> CodeFrame:
    source = tuple(f"    line {number}" for number in range(1, lines + 1))
    return CodeFrame(**{"file": "train.py", "line": line, "function": "main", "first": 1, "source": source, **more})  # type: ignore[arg-type]


def box(**more: object) -> FailureBox:
    return FailureBox(**{"title": "lockstep: the job failed", "headline": "Rank 1 raised ValueError.", **more})  # type: ignore[arg-type]


CLOSING = tuple(Entry(label=label, text=f"{label} text") for label in ("Cause", "Fix", "Others", "Logs"))


def test_the_headline_is_the_first_line_and_the_labels_come_last() -> None:
    lines = plain(box(frames=(frame(),), closing=CLOSING)).splitlines()
    assert lines[0].startswith("──── lockstep: the job failed ─")
    assert lines[1] == "Rank 1 raised ValueError."
    assert lines[3:9] == [
        "train.py:5 in main",
        "    3  line 3",
        "    4  line 4",
        "  ❱ 5  line 5",
        "    6  line 6",
        "    7  line 7",
    ]
    assert lines[-5:-1] == [f"{entry.label:10}{entry.text}" for entry in CLOSING]


LONG = "a very long text " * 5000
HUGE = {
    "a headline": box(headline=LONG, closing=CLOSING),
    "10,000 lines": box(details=tuple(f"line {n}" for n in range(10_000)), closing=CLOSING),
    "1 MB": box(details=("x" * 1_000_000,), closing=CLOSING),
    "frames": box(frames=tuple(frame() for _ in range(500)), closing=CLOSING),
    "cause and fix": box(closing=tuple(Entry(label=label, text=LONG) for label in ("Cause", "Fix", "Others", "Logs"))),
    "places": box(places=tuple(Entry(label="Waiting", text=LONG, code=LONG) for _ in range(50)), closing=CLOSING),
    "everything": box(
        headline=LONG,
        frames=tuple(frame() for _ in range(50)),
        details=("x" * 500,) * 100,
        places=tuple(Entry(label="Waiting", text=LONG) for _ in range(50)),
        closing=tuple(Entry(label=label, text=LONG) for label in ("Cause", "Fix", "Others", "Logs")),
        raised_in=LONG,
    ),
}


@pytest.mark.parametrize("what", HUGE)
def test_no_box_has_more_lines_than_fit(what: str) -> None:
    lines = plain(HUGE[what]).splitlines()
    assert len(lines) <= LINES
    assert any(line.startswith("Logs ") for line in lines)  # the end is never what is left out
    assert len("\n".join(lines)) < 10_000


def test_it_is_reported_how_much_is_left_out() -> None:
    text = plain(HUGE["10,000 lines"])
    assert "line 0\n" in text
    shown = text.count("\nline ")
    assert f"… {10_000 - shown:,} more lines" in text


def test_a_deep_stack_keeps_its_ends() -> None:
    deep = tuple(frame(line=n + 1, lines=20) for n in range(16))
    lines = plain(box(frames=deep, closing=CLOSING)).splitlines()
    sites = [line for line in lines if line.startswith("train.py:")]
    assert sites[0] == "train.py:1 in main"
    assert sites[-1] == "train.py:16 in main"
    assert "  …" in lines


def test_a_recursion_is_counted() -> None:
    assert "train.py:5 in main (990 more times)" in plain(box(frames=(frame(repeats=990),)))


def test_a_frame_without_source_has_its_place() -> None:
    assert plain(box(frames=(frame(source=(), first=0),))).splitlines()[3] == "train.py:5 in main"


def test_control_characters_are_written_out() -> None:
    evil = "\x1b]0;title\x07\x1b[2J"
    text = plain(
        box(
            title=evil,
            headline=evil,
            details=(evil,),
            frames=(frame(source=(evil,), first=5, file=evil, function=evil),),
            raised_in=evil,
            places=(Entry(label="Waiting", text=evil, code=evil),),
            closing=(Entry(label="Cause", text=evil),),
        )
    )
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count("\\x1b[2J") >= 8


def test_paths_below_the_working_directory_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = plain(box(headline=f"at {tmp_path}/train.py:3", closing=(Entry(label="Logs", text=f"{tmp_path}/logs"),)))
    assert "at train.py:3" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("width", [80, 100, 120])
def test_on_a_terminal_no_line_is_wider(width: int) -> None:
    for one in HUGE.values():
        lines = uncoloured(draw(one, width)).splitlines()
        assert all(len(line) <= width for line in lines)
        assert lines[0].startswith("╭─ lockstep: the job failed ─")
    assert len(draw(HUGE["everything"], width, coloured=False).splitlines()) <= LINES + 10  # words that are too long


def test_colours_can_be_left_out() -> None:
    assert "\x1b[" in draw(box(), 100)
    assert "\x1b[3" not in draw(box(), 100, coloured=False)


def test_a_file_gets_plain_text() -> None:
    reader, writer = os.pipe()
    try:
        text = render(box(frames=(frame(),)), writer)
    finally:
        os.close(reader)
        os.close(writer)
    assert "\x1b" not in text
    assert text == encodable(plain(box(frames=(frame(),))))


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_gets_the_drawn_box(
    variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    reader, writer = os.openpty()
    try:
        text = render(box(frames=(frame(),)), writer)
        monkeypatch.setenv("TERM", "dumb")
        assert "╭" not in render(box(), writer)
    finally:
        os.close(reader)
        os.close(writer)
    assert "╭" in text
    assert ("\x1b[1;31m" in text or "\x1b[31m" in text) == coloured
