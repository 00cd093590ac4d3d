"""Whether a schedule ends where the training ends, from numbers alone."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.optim import lr_scheduler

from lockstep.optim.horizon import judge, schedule_length


@pytest.mark.parametrize(
    ("length", "steps_per_epoch", "before", "after"),
    [
        (300, 100, 100, 100),  # one process, three epochs
        (300, 100, 100, 50),  # two processes, Accelerate's rule, counted on the loader as it was
        (150, 50, 100, 50),  # two processes, one step per update, counted on the prepared loader
        (75, 25, 100, 100),  # accumulation over 4, counted in updates
        (130, 100, 100, 100),  # says nothing about epochs: no judgement
        (100, 0, 0, 0),
    ],
)
def test_a_schedule_that_fits(length: int, steps_per_epoch: int, before: int, after: int) -> None:
    assert judge(length, steps_per_epoch, before, after) is None


@pytest.mark.parametrize(
    ("length", "steps_per_epoch", "before", "after", "verdict"),
    [
        (40, 100, 100, 100, "ends early, before the first epoch is over"),
        (150, 100, 100, 50, "ends early, if 3 × 50 batches were meant"),
        (300, 25, 100, 100, "will not end within 3 epochs, if 3 × 100 batches were meant"),
        (100, 25, 100, 100, "will not end within 1 epoch, if 1 × 100 batches were meant"),
        (300, 50, 100, 50, "will not end within 3 epochs, if 3 × 100 batches were meant"),
        (40, 100, None, 100, "ends early"),
    ],
)
def test_a_schedule_that_does_not(
    length: int, steps_per_epoch: int, before: int | None, after: int, verdict: str
) -> None:
    line = judge(length, steps_per_epoch, before, after)
    assert line is not None
    assert verdict in line
    assert f"{length} steps long" in line
    assert f"advances it by {steps_per_epoch}" in line
    assert "\n" not in line


def warmup(step: int, *, num_training_steps: int) -> float:
    return step / num_training_steps


def test_lengths() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert schedule_length(lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=7)) == 7
    assert schedule_length(lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)) == 8
    assert schedule_length(lr_scheduler.LinearLR(optimizer, total_iters=9)) == 9
    partial = functools.partial(warmup, num_training_steps=11)
    assert schedule_length(lr_scheduler.LambdaLR(optimizer, partial)) == 11
    assert schedule_length(lr_scheduler.StepLR(optimizer, step_size=3)) is None
    assert schedule_length(object()) is None
