"""One effective batch on 1, 2 and 4 processes: what is told of it, and that ``reproducible`` trains the same model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, DataLoaderConfiguration, UsageError, set_seed
from lockstep.testing import run_ranks
from lockstep.testing.outcome import Outcome
from tests.ranks import in_soak

SEED = 11


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True) + 0.1 * torch.arange(count).view(-1, 1) / count)


def train(
    count: int,
    batch_size: int,
    accumulation: int,
    *,
    epochs: int = 1,
    optimizer: str = "sgd",
    shuffle: bool = True,
    **arguments: Any,
) -> list[list[float]]:
    """Train a small network; its parameters after each epoch."""
    set_seed(SEED)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=True, **arguments)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    rule = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    loader = DataLoader(samples(count), batch_size=batch_size, shuffle=shuffle)
    model, rule, loader = accelerator.prepare(model, rule, loader)
    seen = []
    for _ in range(epochs):
        for inputs, wanted in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), wanted))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                rule.step()
                rule.zero_grad()
        seen.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist())
    return seen


# ---------------------------------------------------------------- the line, the record, the warning


def told(outcomes: list[Outcome]) -> list[list[str]]:
    """The lines of the run's logger, by rank."""
    assert [outcome.error_text for outcome in outcomes] == [""] * len(outcomes)
    return [[line for line in outcome.output.splitlines() if "lockstep.run" in line] for outcome in outcomes]


def test_the_set_up_is_told_once_on_the_main_process() -> None:
    first, second = told(run_ranks(train, 2, 64, 4, 2, epochs=2, on_failure="collect"))
    assert first == [
        "INFO [rank 0] lockstep.run: effective batch 16 (4 per process x 2 processes x 2 accumulation), "
        f"learning rate 0.05, seed {SEED}, precision no"
    ]
    assert second == []


def test_batches_that_are_split() -> None:
    first, _ = told(run_ranks(train, 2, 64, 8, 1, split_batches=True, on_failure="collect"))
    assert "effective batch 8 (4 per process x 2 processes x 1 accumulation)" in first[0]


def test_the_record_and_the_warning_of_the_next_run(tmp_path: Path) -> None:
    def run(world_size: int, batch_size: int, accumulation: int) -> list[list[str]]:
        return told(
            run_ranks(train, world_size, 64, batch_size, accumulation, project_dir=tmp_path, on_failure="collect")
        )

    assert [len(lines) for lines in run(2, 4, 2)] == [1, 0]
    kept = json.loads((tmp_path / "lockstep_run.json").read_text())
    assert {
        "effective_batch": 16,
        "per_process": 4,
        "processes": 2,
        "accumulation": 2,
        "learning_rate": 0.05,
        "seed": SEED,
        "precision": "no",
    }.items() <= kept.items()
    # The same effective batch on other processes is nothing to warn of.
    assert [len(lines) for lines in run(1, 16, 1)] == [1]
    first, second = run(2, 16, 1)
    assert second == []
    _, warning = first
    assert warning.startswith("WARNING [rank 0] lockstep.run: ")
    assert "effective batch of 16 (16 x 1 process x 1), this one has 32 (16 x 2 processes x 1)" in warning
    assert "8 samples per process on the present 2 processes" in warning
    assert "from 0.05 to 0.1 (it is 0.05)" in warning
    assert json.loads((tmp_path / "lockstep_run.json").read_text())["effective_batch"] == 32


# ---------------------------------------------------------------- reproducible

SET_UPS = [(1, 4, 4), (2, 8, 1), (2, 4, 2), (4, 4, 1), (4, 2, 2)]
"""Processes, batch per process, accumulation: 16 samples per update, as the reference has on one process at a time."""


def far(count: int, world_size: int, batch_size: int, accumulation: int, **arguments: Any) -> float:
    """How far the parameters are, at most, from those of one process that takes each update's samples at once."""
    arguments = {"epochs": 3, "reproducible": True, **arguments}
    (reference,) = run_ranks(train, 1, count, 16, 1, **arguments)
    if arguments.pop("split_batches", False):
        arguments["dataloader_config"] = DataLoaderConfiguration(split_batches=True)
        batch_size *= world_size
    ranks = run_ranks(train, world_size, count, batch_size, accumulation, **arguments)
    assert all(rank == ranks[0] for rank in ranks)
    return (torch.tensor(ranks[0]) - torch.tensor(reference)).abs().max().item()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("world_size", "batch_size", "accumulation"), SET_UPS)
def test_the_same_parameters_on_any_number_of_processes(
    world_size: int, batch_size: int, accumulation: int, optimizer: str
) -> None:
    assert far(96, world_size, batch_size, accumulation, optimizer=optimizer) <= 1e-6


def test_a_window_that_is_not_full() -> None:
    """Seven rounds of 8 samples in windows of two: the last update has half of them, and is the mean over these."""
    assert far(56, 2, 4, 2) <= 1e-6
    assert far(56, 1, 4, 4) <= 1e-6


def test_batches_that_are_split_train_the_same() -> None:
    assert far(96, 2, 4, 2, split_batches=True) <= 1e-6


def test_the_variable_does_the_same() -> None:
    with_argument = run_ranks(train, 2, 96, 8, 1, reproducible=True)
    assert run_ranks(train, 2, 96, 8, 1, env={"LOCKSTEP_REPRODUCIBLE": "1"}) == with_argument


@pytest.mark.parametrize(("world_size", "batch_size", "accumulation"), SET_UPS)
@pytest.mark.parametrize("count", [3, 103, *in_soak(97, 111)])
def test_a_tail_that_does_not_divide(count: int, world_size: int, batch_size: int, accumulation: int) -> None:
    """One to fifteen samples are left for the last update: some ranks have few of them, some none."""
    assert far(count, world_size, batch_size, accumulation) <= 1e-6


@pytest.mark.parametrize("count", [97, 103])
def test_a_tail_of_split_batches(count: int) -> None:
    assert far(count, 2, 4, 2, split_batches=True) <= 1e-6
    assert far(count, 4, 2, 2, split_batches=True) <= 1e-6


@pytest.mark.parametrize("count", [96, 97, 103])
def test_data_that_rank_0_reads_for_all(count: int) -> None:
    options = DataLoaderConfiguration(dispatch_batches=True)
    assert far(count, 2, 8, 1, dataloader_config=options) <= 1e-6
    assert far(count, 4, 2, 2, dataloader_config=options) <= 1e-6


def explicit(weights: list[int]) -> float:
    """The gradient of a weight whose loss is the rank's number + 1, weighted by hand."""
    accelerator = Accelerator(cpu=True, reproducible=True)
    model = nn.Linear(1, 1, bias=False)
    model, _, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(torch.tensor([[1.0], [2.0]]), batch_size=1)
    )
    for batch in loader:
        accelerator.backward(model(batch).mean(), num_items=weights[accelerator.process_index])
    return model.module.weight.grad.item()


def test_a_given_number_of_items_wins() -> None:
    assert run_ranks(explicit, 2, [3, 1]) == pytest.approx([(3 * 1 + 2) / 4] * 2)


def by_real_samples(real: tuple[int, int]) -> float:
    """The gradient of a weight whose loss is the mean of 1, 2, 3 on rank 0, of nothing good on rank 1."""
    accelerator = Accelerator(cpu=True, reproducible=True)
    model = nn.Linear(1, 1, bias=False)
    data = torch.tensor([[1.0], [2.0], [3.0], [7.0], [7.0], [7.0 if real[1] else float("nan")]])
    model, loader = accelerator.prepare(model, DataLoader(data, batch_size=3))
    for batch in loader:
        accelerator._state.current_batch.newest.round = SimpleNamespace(real=real)
        accelerator.backward(model(batch).mean())
    return model.module.weight.grad.item()


def test_a_loss_counts_as_much_as_its_batch_has_real_samples() -> None:
    assert run_ranks(by_real_samples, 2, (3, 3)) == pytest.approx([4.5] * 2)
    assert run_ranks(by_real_samples, 2, (3, 1)) == pytest.approx([(3 * 2 + 7) / 4] * 2)
    assert run_ranks(by_real_samples, 2, (3, 0)) == pytest.approx([2.0] * 2)


def without_a_loader() -> str:
    accelerator = Accelerator(cpu=True, reproducible=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(UsageError) as caught:
        accelerator.backward(model(torch.zeros(1, 1)).mean())
    return str(caught.value)


def test_without_a_loader_nobody_knows_the_samples() -> None:
    for text in run_ranks(without_a_loader, 2):
        assert "num_items" in text
