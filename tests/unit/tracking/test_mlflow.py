"""MLflow with a local store: what its client reads back."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import Accelerator, ConfigError
from lockstep.tracking import MLflowTracker

pytestmark = pytest.mark.usefixtures("alone")
mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A database where MLflow is whole; the skinny one has files only."""
    for name in (
        "MLFLOW_EXPERIMENT_NAME",
        "MLFLOW_RUN_ID",
        "MLFLOW_TAGS",
        "MLFLOW_NESTED_RUN",
        "_MLFLOW_TELEMETRY_SESSION_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    whole = all(importlib.util.find_spec(name) for name in ("sqlalchemy", "alembic"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/m.db" if whole else f"file:{tmp_path}/runs")
    yield tmp_path
    mlflow.end_run()


def logged(name: str) -> Any:
    """The only run of an experiment."""
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name(name).experiment_id])
    return run


def test_values_are_read_back(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(log_with="mlflow")
    config = {"lr": 0.1, "deep": {"a": [1, 2]}, "none": None, "long": "x" * 100_000}
    options = {"run_name": "mine", "tags": {"team": "a"}}
    accelerator.init_trackers("project", config=config, init_kwargs={"mlflow": options})
    for step in range(3):
        accelerator.log({"loss": torch.tensor(0.5**step), "text": "x"}, step=step)
    (store / "note.txt").write_text("kept")
    (store / "folder").mkdir()
    (store / "folder" / "a.txt").write_text("a")
    tracker = accelerator.get_tracker("mlflow")
    tracker.log_artifact(str(store / "note.txt"))
    tracker.log_artifacts(str(store / "folder"), artifact_path="all")
    accelerator.end_training()

    run = logged("project")
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "mine"
    assert run.data.tags["team"] == "a"
    assert run.data.params == {"lr": "0.1", "deep": "{'a': [1, 2]}", "none": "None"}
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert set(run.data.metrics) == {"loss"}
    names = {item.path for folder in (None, "all") for item in client.list_artifacts(run.info.run_id, folder)}
    assert names == {"note.txt", "all", "all/a.txt"}
    assert "Longer ones were left out: long." in caplog.text
    assert caplog.text.count("'text' is a str and was left out") == 1


def test_a_second_run_of_an_experiment_and_one_that_is_continued(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = []
    for _ in range(2):
        tracker = MLflowTracker("project")
        tracker.start()
        ids.append(tracker.tracker.info.run_id)
        tracker.finish()
    assert ids[0] != ids[1]
    monkeypatch.setenv("MLFLOW_RUN_ID", ids[0])
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "project")
    monkeypatch.setenv("MLFLOW_TAGS", '{"from": "outside"}')
    tracker = MLflowTracker("another")
    tracker.start()
    tracker.log({"x": 1})
    tracker.finish()
    run = mlflow.MlflowClient().get_run(ids[0])
    assert (run.data.metrics, run.data.tags["from"]) == ({"x": 1.0}, "outside")
    assert mlflow.MlflowClient().get_experiment_by_name("another") is None


def test_another_thread_logs_to_the_same_run(store: Path) -> None:
    """MLflow's own idea of the active run is that of one thread."""
    tracker = MLflowTracker("project")
    tracker.start()
    thread = threading.Thread(target=tracker.log, args=({"x": 2},))
    thread.start()
    thread.join()
    tracker.finish()
    assert logged("project").data.metrics == {"x": 2.0}


@pytest.mark.parametrize("tags", ["{", "[1]"])
def test_tags_that_are_not_json(tags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TAGS", tags)
    with pytest.raises(ConfigError, match=r"MLFLOW_TAGS='.*' is not"):
        MLflowTracker("project")


def test_a_store_that_is_not_there(
    store: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "gopher://nowhere")
    accelerator = Accelerator(log_with="mlflow")
    accelerator.init_trackers("project")
    accelerator.log({"x": 1})
    assert accelerator.trackers == []
    assert "Tracker 'mlflow': start() raised" in caplog.text
