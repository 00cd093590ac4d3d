"""Weights & Biases, offline: what is in the run's file afterwards."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import Accelerator

pytestmark = pytest.mark.usefixtures("alone")
wandb = pytest.importorskip("wandb", reason="wandb is not installed")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """One run, as its file has it: starting wandb's service takes seconds."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_DIR"):
            patch.setenv(name, str(folder))
        patch.setenv("WANDB_SILENT", "true")
        accelerator = Accelerator(log_with="wandb")
        options = {"mode": "offline", "name": "mine", "settings": {"x_disable_stats": True, "console": "off"}}
        accelerator.init_trackers("project", {"lr": 0.1, "deep": {"a": [1, 2]}}, init_kwargs={"wandb": options})
        tracker = accelerator.get_tracker("wandb")
        assert accelerator.get_tracker("wandb", unwrap=True) is tracker.run
        for step in range(3):
            accelerator.log({"loss": torch.tensor(0.5**step), "text": "x"}, step=step, log_kwargs={"wandb": {}})
        tracker.log_images({"image": [np.zeros((4, 4, 3), np.uint8)]}, step=3)
        tracker.log_table("table", columns=["a", "b"], data=[[1, "x"], [2, "y"]], step=4)
        accelerator.end_training()
        wandb.teardown()
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    return file.parent, records(file)


def records(file: Path) -> list[Any]:
    """The records of a file: in blocks of 32 KiB, each part with checksum, length, and whether it is the last."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, part, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            found.append(Record.FromString(part))
            part = b""
    return found


def items(entries: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in entries:
        *outer, last = [entry.key] if entry.key else entry.nested_key
        place = found
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = json.loads(entry.value_json)
    return found


def history(run: tuple[Path, list[Any]]) -> list[dict[str, Any]]:
    return [items(record.history.item) for record in run[1] if record.WhichOneof("record_type") == "history"]


def test_numbers_and_texts(run: tuple[Path, list[Any]]) -> None:
    logged = [entry for entry in history(run) if "loss" in entry]
    assert [(entry["_step"], entry["loss"], entry["text"]) for entry in logged] == [
        *((0, 1.0, "x"), (1, 0.5, "x"), (2, 0.25, "x"))
    ]


def test_the_run_and_its_configuration(run: tuple[Path, list[Any]]) -> None:
    [begun] = [record.run for record in run[1] if record.WhichOneof("record_type") == "run"]
    assert (begun.project, begun.display_name) == ("project", "mine")
    config: dict[str, Any] = {}
    for record in run[1]:
        config.update(items(record.config.update))
    assert (config["lr"], config["deep"]) == (0.1, {"a": [1, 2]})


def test_images_and_tables(run: tuple[Path, list[Any]]) -> None:
    folder, _ = run
    [image] = [entry["image"] for entry in history(run) if "image" in entry]
    [name] = image["filenames"]
    assert (folder / "files" / name).read_bytes().startswith(b"\x89PNG")
    [table] = [entry["table"] for entry in history(run) if "table" in entry]
    kept = json.loads((folder / "files" / table["path"]).read_text())
    assert (kept["columns"], kept["data"]) == (["a", "b"], [[1, "x"], [2, "y"]])


def test_a_broken_set_up_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(log_with=["wandb", "jsonl"], project_dir=tmp_path)
    accelerator.init_trackers("a/b", init_kwargs={"wandb": {"mode": "offline", "dir": str(tmp_path)}})
    assert [tracker.name for tracker in accelerator.trackers] == ["jsonl"]
    assert "Tracker 'wandb': start() raised" in caplog.text
    accelerator.get_tracker("wandb").log_images({"x": []})
    accelerator.end_training()
