"""The thread that looks goes on whatever a look runs into."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockstep.guard import watcher
from lockstep.guard.watcher import RenderedDiagnosis, Watcher
from lockstep.rundir.layout import RunDirectory


def test_a_look_that_fails_is_told_once_and_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def look(self: Watcher) -> RenderedDiagnosis | None:
        looks.append(1)
        raise OSError("no such box")

    monkeypatch.setattr(watcher, "INTERVAL", 0.01)
    monkeypatch.setattr(Watcher, "poll", look)
    told: list[str] = []
    guard = Watcher(RunDirectory(path=tmp_path), tell=told.append, stop=lambda found: None)
    guard.start()
    until = time.monotonic() + 10
    while len(looks) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    guard.close()
    assert len(looks) >= 3
    assert len(told) == 1
    assert "OSError: no such box" in told[0]
