"""Trackers whose packages are too heavy for every run: where one is installed, what it has stored offline."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.tracking.registry import is_available

SCRIPT = """
import sys, json, torch
from lockstep import Accelerator
name, options = sys.argv[1], json.loads(sys.argv[2])
accelerator = Accelerator(log_with=name, project_dir="project")
accelerator.init_trackers("mine", config={"lr": 0.1, "deep": {"a": [1, 2]}}, init_kwargs={name: options})
assert len(accelerator.trackers) == 1
for step in range(3):
    accelerator.log({"loss": torch.tensor(0.5**step)}, step=step)
accelerator.end_training()
"""


def of_dvclive(folder: Path) -> list[float]:
    lines = (folder / "live/plots/metrics/loss.tsv").read_text().splitlines()
    return [float(line.split("\t")[1]) for line in lines[1:]]


def of_comet_ml(folder: Path) -> list[float]:
    [file] = folder.glob("comet/*.zip")
    lines = zipfile.ZipFile(file).read("messages.json").decode().splitlines()
    metrics = [json.loads(line)["payload"].get("metric") or {} for line in lines]
    return [metric["metricValue"] for metric in metrics if metric.get("metricName") == "loss"]


def of_trackio(folder: Path) -> list[float]:
    [file] = folder.glob(".cache/huggingface/trackio/*.db")
    with sqlite3.connect(file) as store:
        rows = store.execute("select metrics from metrics order by step").fetchall()
        [(config,)] = store.execute("select config from configs").fetchall()
    store.close()
    assert "allow_val_change" not in json.loads(config)
    return [json.loads(row[0])["loss"] for row in rows]


CASES: list[tuple[str, dict[str, Any], Callable[[Path], list[float]]]] = [
    ("dvclive", {"dir": "live", "save_dvc_exp": False}, of_dvclive),
    ("comet_ml", {"online": False}, of_comet_ml),
    ("trackio", {}, of_trackio),
]


@pytest.mark.parametrize(("name", "options", "stored"), CASES, ids=[case[0] for case in CASES])
def test_what_is_stored(
    name: str, options: dict[str, Any], stored: Callable[[Path], list[float]], tmp_path: Path
) -> None:
    if not is_available(name):
        pytest.skip(f"{name} is not installed")
    offline = {"COMET_OFFLINE_DIRECTORY": str(tmp_path / "comet")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, json.dumps(options)],
        cwd=tmp_path,
        env={**os.environ, **offline, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "lockstep.tracking" not in done.stderr
    assert stored(tmp_path) == [1.0, 0.5, 0.25]
