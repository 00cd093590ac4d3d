"""The example: a script with a --debug argument of its own, and the remedy that its report proposes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.usefixtures("alone")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["overflow.py", *arguments])
    runpy.run_path(str(ROOT / "examples" / "overflow.py"), run_name="__main__")


def test_the_detector_names_the_module_and_its_remedy_helps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"batch_number=13 \(inf in output of block.scale"):
        run(monkeypatch, "--debug", "underflow_overflow")
    out = capsys.readouterr().out
    assert "in samples 104, 105, " in out
    assert 'Remedy: run_in_fp32(model, "block.scale")' in out
    run(monkeypatch, "--debug", "underflow_overflow", "--fp32", "block.scale")
    assert "16 steps, " in capsys.readouterr().out


def test_updates_are_dropped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--nan-policy", "skip")
    assert "4 updates dropped" in capsys.readouterr().out
