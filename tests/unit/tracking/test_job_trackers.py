"""What an Accelerator does with its trackers, and with those that fail."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from lockstep import Accelerator, ConfigError
from lockstep.tracking import JsonlTracker, read_records
from tests.unit.tracking.recording import Recorder

pytestmark = pytest.mark.usefixtures("alone")


def test_a_run_from_start_to_end() -> None:
    own = Recorder()
    accelerator = Accelerator(log_with=own)
    assert accelerator.trackers == []
    config = {"lr": 0.1}
    accelerator.init_trackers("project", config=config)
    assert accelerator.trackers == [own]
    tensor = object()
    accelerator.log({"loss": tensor}, step=3, log_kwargs={"recorder": {"extra": 1}, "other": {"more": 2}})
    accelerator.log({"loss": 2})
    accelerator.end_training()
    assert own.calls == [
        ("start",),
        ("config", config),
        ("log", {"loss": tensor}, 3, {"extra": 1}),
        ("log", {"loss": 2}, None, {}),
        ("finish",),
    ]


def test_getting_one() -> None:
    own = Recorder()
    accelerator = Accelerator(log_with=[own])
    assert type(accelerator.get_tracker("recorder")).__name__ == "GeneralTracker"  # not running yet
    accelerator.init_trackers("project")
    assert accelerator.get_tracker("recorder") is own
    assert accelerator.get_tracker("recorder", unwrap=True) is own.calls
    with pytest.raises(ConfigError, match=r"get_tracker\('wandb'\): there is no tracker.*Running: 'recorder'"):
        accelerator.get_tracker("wandb")
    Accelerator().get_tracker("wandb").log({"x": 1})  # no trackers at all: as on other ranks, nothing happens


def test_logging_before_the_trackers_run_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    own = Recorder("early")
    accelerator = Accelerator(log_with=own)
    for step in range(3):
        accelerator.log({"x": step})
    assert own.calls == []
    assert caplog.text.count("init_trackers() has not been called, so nothing is logged") == 1
    Accelerator().log({"x": 1})
    assert len(caplog.records) == 1


def test_logging_after_the_end_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    own = Recorder()
    accelerator = Accelerator(log_with=own)
    accelerator.init_trackers("project")
    trackers = accelerator._tracking
    assert trackers is not None
    trackers.finish()
    trackers.finish()
    accelerator.log({"x": 1})
    assert own.calls == [("start",), ("finish",)]
    assert "end_training() has been called, so nothing is logged" in caplog.text


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConnectionError("down"), RuntimeError("x")])
def test_a_tracker_that_fails_is_reported_once_and_at_the_end(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = Recorder("broken", fails={"log": error}), Recorder("sound")
    accelerator = Accelerator(log_with=[broken, sound])
    accelerator.init_trackers("project", config={"a": 1})
    for step in range(5):
        accelerator.log({"x": step}, step=step)
    [first] = caplog.messages
    assert first.startswith(f"Tracker 'broken': log() raised {type(error).__name__}: ")
    assert str(error) in first
    assert [call[0] for call in sound.calls].count("log") == 5
    accelerator.end_training()
    assert "Tracker 'broken': 5 calls failed" in caplog.messages[-1]
    assert sound.calls[-1] == ("finish",)


@pytest.mark.parametrize("method", ["config", "finish"])
def test_other_calls_that_fail(method: str, caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Recorder("broken", fails={method: OSError("gone")}), Recorder("sound")
    accelerator = Accelerator(log_with=[broken, sound])
    accelerator.init_trackers("project", config={"a": 1})
    accelerator.log({"x": 1})
    accelerator.end_training()
    assert [call[0] for call in sound.calls] == ["start", "config", "log", "finish"]
    assert len(caplog.messages) == 1
    assert "OSError: gone" in caplog.text


def test_a_tracker_that_cannot_start_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Recorder("broken", fails={"start": ConnectionError("no route")}), Recorder("sound")
    accelerator = Accelerator(log_with=[broken, sound])
    accelerator.init_trackers("project", config={"a": 1})
    accelerator.log({"x": 1})
    assert accelerator.trackers == [sound]
    assert broken.calls == []
    assert "Tracker 'broken': start() raised ConnectionError: no route" in caplog.text
    run = accelerator.get_tracker("broken", unwrap=True)
    run.summary["best"] = run.config.lr
    with run.section("a") as section:
        section.log({"x": 1}).commit()
    assert accelerator.get_tracker("sound") is sound


def test_arguments_that_do_not_fit_raise(tmp_path: Path) -> None:
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    with pytest.raises(
        ConfigError, match=r"init_kwargs\['jsonl'\]=\{'colour': 1\} does not fit JsonlTracker: .*colour"
    ):
        accelerator.init_trackers("project", init_kwargs={"jsonl": {"colour": 1}})
    with pytest.raises(ConfigError, match=r"durable='yes' must be True or False"):
        accelerator.init_trackers("project", init_kwargs={"jsonl": {"durable": "yes"}})
    broken = Accelerator(log_with=Recorder("broken", fails={"start": TypeError("unexpected keyword 'a'")}))
    with pytest.raises(ConfigError, match="Tracker 'broken' cannot be started with these init_kwargs"):
        broken.init_trackers("project")


def test_a_second_run(tmp_path: Path) -> None:
    """Built-in trackers begin anew; what the user has made goes on."""
    own = Recorder()
    accelerator = Accelerator(log_with=[own, "jsonl"], project_dir=tmp_path)
    for name in ("first", "second"):
        accelerator.init_trackers(name, config={"name": name})
        accelerator.log({"x": 1})
    assert [call[0] for call in own.calls] == ["start", "config", "log", "config", "log"]
    assert [tracker.name for tracker in accelerator.trackers] == ["recorder", "jsonl"]
    accelerator.end_training()
    for name in ("first", "second"):
        assert [record["kind"] for record in read_records(tmp_path / name / "metrics.jsonl")] == [
            *("start", "config", "log")
        ]


def test_a_built_in_tracker_by_hand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = JsonlTracker("run", tmp_path)
    tracker.log({"x": 1})
    assert "Tracker 'jsonl' is not running" in caplog.text
    tracker.start()
    tracker.log({"x": 1})
    tracker.finish()
    tracker.finish()
    assert [record["kind"] for record in read_records(tmp_path / "run" / "metrics.jsonl")] == ["start", "log"]


def test_training_goes_on_whatever_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("run")
    wrong: Any = 3.0
    accelerator.log(wrong)
    accelerator.log({"x": 1}, log_kwargs={"jsonl": {"note": "extra"}})
    accelerator.end_training()
    assert "log() raised TypeError: log() takes a dict of names and values, and got a float" in caplog.text
    *_, last = read_records(tmp_path / "run" / "metrics.jsonl")
    assert (last["values"], last["note"]) == ({"x": 1}, "extra")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lockstep.tracking")
