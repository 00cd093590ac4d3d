"""The file of records: whole lines, whatever happens."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import Accelerator
from lockstep.tracking import read_records
from lockstep.tracking.jsonl import JsonLines, JsonlTracker

pytestmark = pytest.mark.usefixtures("alone")


@dataclass
class Settings:
    depth: int
    path: Path


class Colour(Enum):
    RED = "red"


def read(path: Path) -> list[dict[str, Any]]:
    """As anybody reads it."""
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in lines]


def test_what_is_kept(tmp_path: Path) -> None:
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    nested = {"model": {"layers": [1, 2], "dtype": torch.float32}, "none": None, "set": Settings(3, Path("x"))}
    accelerator.init_trackers("run", config=nested)
    before = time.time()
    accelerator.log({"loss": 0.5, "n": 3, "ok": True, "text": "ünï\n"}, step=7)
    accelerator.log({"loss": torch.tensor(1.5), "np": np.float32(0.25), "many": torch.arange(3), "c": Colour.RED})
    accelerator.get_tracker("jsonl").log_table("table", columns=["a", "b"], data=[[1, "x"], [2.0, None]], step=8)
    accelerator.end_training()
    start, config, first, second, table = read(tmp_path / "run" / "metrics.jsonl")
    assert start["project"] == "run"
    assert config["values"] == {
        "model": {"layers": [1, 2], "dtype": "torch.float32"},
        "none": None,
        "set": {"depth": 3, "path": "x"},
    }
    assert (first["step"], first["values"]) == (7, {"loss": 0.5, "n": 3, "ok": True, "text": "ünï\n"})
    assert before - 1 < first["time"] < time.time() + 1
    assert (second["step"], second["values"]) == (None, {"loss": 1.5, "np": 0.25, "many": [0, 1, 2], "c": "red"})
    assert (table["name"], table["columns"], table["rows"]) == ("table", ["a", "b"], [[1, "x"], [2.0, None]])


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    tracker = JsonlTracker("run", tmp_path)
    tracker.start()
    tracker.log({"loss": float("nan"), "deep": {"a": [math.inf, -math.inf, 1.0]}})
    tracker.finish()
    values = read(tracker.path)[-1]["values"]
    assert values == {"loss": "NaN", "deep": {"a": ["Infinity", "-Infinity", 1.0]}}
    assert math.isnan(float(values["loss"]))


def test_a_run_is_continued_and_a_cut_line_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    for attempt in range(3):
        tracker = JsonlTracker("run", tmp_path)
        tracker.start()
        tracker.log({"attempt": attempt})
        tracker.finish()
        with path.open("ab") as file:
            file.write(b'{"kind": "log", "val' * (1 + 5000 * attempt))
        assert len(list(read_records(path))) == 2 * (attempt + 1)
    tracker = JsonlTracker("run", tmp_path)
    tracker.start()
    tracker.finish()
    assert [record["values"]["attempt"] for record in read(path) if record["kind"] == "log"] == [0, 1, 2]


def test_a_full_disk_costs_the_record_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The kernel writes half of it, then refuses: what it wrote is taken back."""
    code = f"""
import resource, signal
from lockstep.tracking.jsonl import JsonlTracker
tracker = JsonlTracker("run", {str(tmp_path)!r})
tracker.start()
tracker.log({{"x": 1}}, step=1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
tracker.log({{"x": "y" * 1000}}, step=2)
tracker.log({{"x": "y" * 1000}}, step=3)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
tracker.log({{"x": "y" * 1000}}, step=4)
tracker.finish()
print("trained to the end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "trained to the end" in done.stdout
    assert done.stderr.count("Tracker 'jsonl': log() raised OSError: [Errno 27] File too large") == 1
    assert [record.get("step") for record in read(tmp_path / "run" / "metrics.jsonl")] == [None, 1, 4]


def write_many(path: str, number: int) -> None:
    lines = JsonLines(Path(path), durable=False)
    for step in range(10_000):
        lines.append({"writer": number, "step": step, "pad": "x" * (step % 700)})


def test_processes_that_share_a_file_and_one_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(str(path), number)) for number in range(3)]
    for writer in writers:
        writer.start()
    deadline = time.monotonic() + 30
    while (not path.exists() or path.stat().st_size < 100_000) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert writers[0].pid is not None
    os.kill(writers[0].pid, signal.SIGKILL)
    for writer in writers:
        writer.join(60)
        writer.close()
    records = read(path)
    for number in range(3):
        steps = [record["step"] for record in records if record["writer"] == number]
        assert steps == list(range(len(steps)))
        assert 0 < len(steps) <= 10_000 if number == 0 else len(steps) == 10_000


@pytest.mark.parametrize("made", ["file", "unwritable"])
def test_a_folder_that_cannot_be(made: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "blocked"
    if made == "file":
        blocked.touch()
    else:
        blocked.symlink_to("/proc/no/such/folder")
    accelerator = Accelerator(log_with="jsonl", project_dir=blocked)
    accelerator.init_trackers("run")
    accelerator.log({"x": 1})
    accelerator.end_training()
    assert "Tracker 'jsonl': start() raised" in caplog.text
    assert len(caplog.records) == 1


def test_durable_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), real(file)))
    for durable, expected in ((False, 0), (True, 3)):
        tracker = JsonlTracker(f"run-{durable}", tmp_path, durable=durable)
        tracker.start()
        tracker.log({"x": 1})
        tracker.log({"x": 2})
        assert len(synced) == expected
        tracker.finish()
        synced.clear()


def test_nothing_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        tracker = JsonlTracker("run", tmp_path)
        tracker.start()
        tracker.finish()
    assert len(os.listdir("/proc/self/fd")) == before
