"""The thread that says where its rank is must not end before the rank does."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.blackbox.box import NoBox
from lockstep.guard import reporter


class Stumbling(NoBox):
    """Fails at its first two looks."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.third = threading.Event()

    def mark(self) -> tuple[int, int, int]:
        self.looks += 1
        if self.looks < 3:
            raise TypeError("no line here")
        self.third.set()
        return (0, self.looks, 0)


def test_an_error_is_told_once_and_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporter, "INTERVAL", 0.01)
    box = Stumbling()
    watching = reporter.Reporter(box, tmp_path / "note", lambda: False)
    assert box.third.wait(20)
    watching.stop()
    assert capsys.readouterr().err.count("TypeError: no line here") == 1


def test_bytecode_that_belongs_to_no_line() -> None:
    frame: Any = SimpleNamespace(f_code=SimpleNamespace(co_filename=__file__), f_lineno=None)
    assert not reporter._is_waiting(frame)
