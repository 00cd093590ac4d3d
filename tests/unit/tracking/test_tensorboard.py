"""TensorBoard: what is in the event files afterwards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lockstep import Accelerator

pytestmark = pytest.mark.usefixtures("alone")
pytest.importorskip("tensorboard", reason="tensorboard is not installed")


def stored(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    return events


def tracked(folder: Path, config: dict[str, Any] | None = None) -> Accelerator:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tensorboard's own imports
        accelerator = Accelerator(log_with="tensorboard", project_dir=folder)
        accelerator.init_trackers("run", config=config, init_kwargs={"tensorboard": {"flush_secs": 30}})
    return accelerator


def test_values_are_read_back(tmp_path: Path) -> None:
    accelerator = tracked(tmp_path)
    for step in (1, 2):
        accelerator.log({"loss": 1 / step, "tensor": torch.tensor(step), "flag": True}, step=step)
    accelerator.log({"note": "some text", "both": {"train": 1.0, "eval": torch.tensor(2.0)}}, step=3)
    found = stored(tmp_path / "run")  # before the end: what is logged is there
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 1.0), (2, 0.5)]
    assert [event.value for event in found.Scalars("tensor")] == [1.0, 2.0]
    assert found.Tensors("note/text_summary")[0].tensor_proto.string_val == [b"some text"]
    accelerator.end_training()
    for part, value in (("train", 1.0), ("eval", 2.0)):
        assert stored(tmp_path / "run" / f"both_{part}").Scalars("both")[0].value == value


def test_images_are_read_back(tmp_path: Path) -> None:
    accelerator = tracked(tmp_path)
    images = torch.rand(2, 3, 4, 5)
    accelerator.get_tracker("tensorboard").log_images({"batch": images}, step=4)
    accelerator.end_training()
    [image] = stored(tmp_path / "run").Images("batch")
    assert (image.step, image.height) == (4, 4)
    assert image.encoded_image_string.startswith(b"\x89PNG")


def test_a_nested_configuration(tmp_path: Path) -> None:
    config = {"lr": 0.1, "model": {"layers": [1, 2], "name": "x"}, "none": None, "dtype": torch.float16}
    accelerator = tracked(tmp_path, config)
    accelerator.end_training()
    [kept] = (tmp_path / "run").glob("*/hparams.yml")
    assert yaml.safe_load(kept.read_text()) == {**config, "dtype": "torch.float16"}
    from tensorboard.plugins.hparams import plugin_data_pb2

    summary = stored(kept.parent).SummaryMetadata("_hparams_/session_start_info")
    known = plugin_data_pb2.HParamsPluginData.FromString(summary.plugin_data.content).session_start_info.hparams
    assert known["lr"].number_value == 0.1
    assert known["model/name"].string_value == "x"
    assert known["model/layers"].string_value == "[1, 2]"


def test_what_it_cannot_store_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = tracked(tmp_path)
    for step in range(3):
        accelerator.log({"weights": torch.ones(2), "loss": 1.0}, step=step)
    accelerator.end_training()
    [message] = caplog.messages
    assert message.startswith(
        "Tracker 'tensorboard' stores numbers, texts and dicts of numbers. 'weights' is a Tensor and was left out."
    )
    assert len(stored(tmp_path / "run").Scalars("loss")) == 3


def test_the_writer_is_at_hand(tmp_path: Path) -> None:
    accelerator = tracked(tmp_path)
    tracker = accelerator.get_tracker("tensorboard")
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    assert tracker.tracker is tracker.writer is writer
    writer.add_scalar("own", 2.0, 5)
    accelerator.end_training()
    assert stored(tmp_path / "run").Scalars("own")[0].step == 5
