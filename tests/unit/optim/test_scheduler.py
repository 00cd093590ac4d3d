"""Learning rate schedules on one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from lockstep import Accelerator

pytestmark = pytest.mark.usefixtures("alone")


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def counting(optimizer: Any) -> LambdaLR:
    """A schedule whose learning rate is the number of its steps."""
    return LambdaLR(optimizer, lambda step: step)


def steps_taken(accelerator: Accelerator, batches: int = 6, make: Any = counting) -> tuple[Any, list[float]]:
    model, optimizer = parts()
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, make(optimizer), DataLoader(torch.ones(batches, 1))
    )
    rates = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean() * 0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return scheduler, rates


def test_one_step_per_update() -> None:
    assert steps_taken(Accelerator(cpu=True))[1] == [1, 2, 3, 4, 5, 6]


def test_it_waits_for_the_window() -> None:
    assert steps_taken(Accelerator(cpu=True, gradient_accumulation_steps=4))[1] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("name", ["step_scheduler_with_optimizer", "step_with_optimizer"])
def test_it_can_go_its_own_way(name: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, **{name: False})
    assert accelerator.step_scheduler_with_optimizer is False
    assert steps_taken(accelerator)[1] == [1, 2, 3, 4, 5, 6]


def test_the_usual_order_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps_taken(Accelerator(cpu=True, gradient_accumulation_steps=3))


@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"scheduler_unit": "update"}])
def test_a_cycle_of_fixed_length_stays_at_its_end(options: dict[str, Any]) -> None:
    scheduler, rates = steps_taken(
        Accelerator(cpu=True, **options),
        batches=8,
        make=lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=4),
    )
    assert scheduler.last_epoch == 4
    assert len(set(rates[3:])) == 1
    assert len(set(rates)) == 4


def test_an_unprepared_scheduler_steps_as_torch_would() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = parts()
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1)).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.last_epoch == 4
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / 16)


def test_a_scheduler_made_for_the_prepared_optimizer() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, raw = parts()
    model, optimizer = accelerator.prepare(model, raw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = accelerator.prepare(StepLR(optimizer, step_size=1, gamma=0.5))
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1)).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert raw.param_groups[0]["lr"] == pytest.approx(1 / 4)


def test_arguments_of_step_are_passed_on() -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer = parts()
    scheduler = accelerator.prepare_scheduler(ReduceLROnPlateau(optimizer, patience=0, factor=0.5))
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25)


def test_prepare_finds_a_plateau_scheduler() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = parts()
    plateau = ReduceLROnPlateau(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, plateau)
    assert scheduler is not plateau
    assert scheduler.scheduler is plateau


def test_state_goes_to_and_from_the_wrapped_scheduler() -> None:
    scheduler, _ = steps_taken(Accelerator(cpu=True))
    _, optimizer = parts()
    fresh = Accelerator(cpu=True).prepare(counting(optimizer))
    fresh.load_state_dict(scheduler.state_dict())
    assert fresh.last_epoch == 6
    assert fresh.state_dict()["last_epoch"] == 6


def horizon_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "learning rate schedule" in line]


@pytest.mark.parametrize(("length", "lines"), [(4, 1), (12, 0), (18, 0)])
def test_a_schedule_that_ends_early_is_logged_once(caplog: pytest.LogCaptureFixture, length: int, lines: int) -> None:
    accelerator = Accelerator(cpu=True)
    scheduler, _ = steps_taken(accelerator, make=lambda optimizer: CosineAnnealingLR(optimizer, T_max=length))
    scheduler.step()
    found = horizon_lines(caplog)
    assert len(found) == lines
    if lines:
        assert f"{length} steps long, and one epoch advances it by 6: it ends after 0.667 epochs" in found[0]


def test_a_schedule_that_may_count_micro_batches_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Twelve micro-batches counted as steps, when four of them make an update; or else four epochs of three updates."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    steps_taken(accelerator, 12, lambda optimizer: CosineAnnealingLR(optimizer, T_max=12))
    (record,) = [record for record in caplog.records if "learning rate schedule" in record.message]
    assert record.levelname == "INFO"
    assert "it ends after 4 epochs. If it was meant for 1 epoch of 12 batches" in record.message


def test_nothing_is_told_of_a_scheduler_that_goes_its_own_way(caplog: pytest.LogCaptureFixture) -> None:
    steps_taken(
        Accelerator(cpu=True, step_with_optimizer=False), make=lambda optimizer: CosineAnnealingLR(optimizer, T_max=4)
    )
    assert horizon_lines(caplog) == []
