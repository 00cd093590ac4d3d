"""A checkpoint is loaded by a script that has prepared more or fewer objects than the one that saved it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, CheckpointError, current

pytestmark = pytest.mark.usefixtures("alone")


def data(samples: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(samples)).reshape(-1, 1)), batch_size=2)


def numbers(loader: Any) -> list[float]:
    return [value for (batch,) in loader for value in batch.flatten().tolist()]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module]:
    """In the middle of an epoch, and of an accumulation window."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, data(), scheduler)
    for number, (batch,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == 2:
            accelerator.save_state(tmp_path / "state", durable=False)
            break
    current.reset()  # the script that loads it may use another precision
    return tmp_path / "state", model


@pytest.mark.parametrize("samples", [8, 12])
def test_an_evaluation_needs_the_model_alone_and_sees_all_its_data(
    saved: tuple[Path, nn.Module], samples: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder, trained = saved
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(nn.Linear(1, 1), data(samples))
    with caplog.at_level(logging.WARNING):
        accelerator.load_state(folder)
    assert torch.equal(model.weight, trained.weight)
    assert model.weight.grad is None
    assert numbers(loader) == list(range(samples))
    assert "1 of 1 optimizers; 1 of 1 schedulers; 1 of 1 loss scalers" in caplog.text
    assert "the position of loader 0 (a new epoch starts)" in caplog.text


@pytest.mark.parametrize("first", [False, True])
def test_a_training_that_has_got_another_loader_goes_on_in_its_own(
    saved: tuple[Path, nn.Module], first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = saved
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator.prepare(model, optimizer, scheduler)
    loaders = [data(6), data()] if first else [data(), data(6)]
    with caplog.at_level(logging.WARNING):
        prepared = accelerator.prepare(*loaders)
        accelerator.load_state(folder)
    if first:  # nobody can know that it is the one that was number 0
        assert [numbers(loader) for loader in prepared] == [list(range(6)), list(range(8))]
        assert "the position of loader 0, 1 (a new epoch starts)" in caplog.text
    else:
        assert [numbers(loader) for loader in prepared] == [[6, 7], list(range(6))]
        assert "the position of loader 1 (a new epoch starts)" in caplog.text


def test_what_would_find_nothing_is_refused(saved: tuple[Path, nn.Module]) -> None:
    folder, _ = saved
    accelerator = Accelerator(cpu=True)
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    before = model.weight.detach().clone()
    accelerator.prepare(model, other, *(torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)))
    with pytest.raises(CheckpointError, match=r"1 models \(here 2\), 1 optimizers \(here 2\)\. Prepare"):
        accelerator.load_state(folder)
    assert torch.equal(model.weight, before)


def test_registered_objects_must_be_the_same(saved: tuple[Path, nn.Module]) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.register_for_checkpointing(nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"0 objects registered for checkpointing \(here 1\)"):
        accelerator.load_state(saved[0])
