"""Trackers of several ranks: the main one logs, and one that fails there stops nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lockstep import Accelerator
from lockstep.testing import run_ranks
from lockstep.tracking import GeneralTracker, on_main_process, read_records


class OnEveryRank(GeneralTracker):
    """Its methods are for the script to call, on each rank."""

    name = "every"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self) -> None:
        self.tracker: list[Any] = []
        super().__init__()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.tracker.append(values)


class Broken(OnEveryRank):
    name = "broken"

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")


def train(folder: str) -> tuple[list[str], list[Any], float]:
    every = OnEveryRank()
    accelerator = Accelerator(log_with=["jsonl", every, Broken()], project_dir=folder)
    accelerator.init_trackers("run", config={"lr": 0.1})
    model, optimizer = accelerator.prepare(layer := torch.nn.Linear(1, 1), torch.optim.SGD(layer.parameters(), lr=0.1))
    for step in range(3):
        loss = model(torch.full((1, 1), float(accelerator.process_index))).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.log({"loss": mean, "rank": accelerator.process_index}, step=step)
    every.log({"by hand": accelerator.process_index})
    names = [tracker.name for tracker in accelerator.trackers]
    accelerator.get_tracker("jsonl").log({"direct": 1})
    accelerator.end_training()
    return names, every.tracker, float(mean)


def test_the_main_rank_logs(tmp_path: Path) -> None:
    first, second = run_ranks(train, 2, str(tmp_path))
    assert first[0] == ["jsonl", "every", "broken"]
    assert second[0] == []
    assert [set(values) for values in first[1]] == [{"loss", "rank"}] * 3 + [{"by hand"}]
    assert second[1] == [{"by hand": 1}]  # the accelerator logs on the main process, the script where it likes
    records = list(read_records(tmp_path / "run" / "metrics.jsonl"))
    logged = [record for record in records if record["kind"] == "log"]
    assert [record["step"] for record in logged] == [0, 1, 2, None]
    assert [record["values"]["rank"] for record in logged[:3]] == [0, 0, 0]
    assert logged[2]["values"]["loss"] == first[2] == second[2]
    assert sum(record["values"] == {"direct": 1} for record in logged) == 1


def absent_here(folder: str) -> str:
    """Only the main rank's node needs the packages."""
    from lockstep.tracking import registry

    rank = Accelerator().process_index
    real = registry.is_installed
    registry.is_installed = lambda *names: rank == 0  # type: ignore[assignment]
    try:
        return repr(Accelerator(log_with="wandb").log_with)
    finally:
        registry.is_installed = real


def test_other_ranks_need_no_package(tmp_path: Path) -> None:
    first, second = run_ranks(absent_here, 2, str(tmp_path))
    assert "WANDB" in first
    assert first == second
