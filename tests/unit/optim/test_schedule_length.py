"""Whether a schedule ends where the training ends, from numbers alone."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from lockstep.optim.schedule_length import describe, schedule_length


@pytest.mark.parametrize(
    ("length", "steps_per_epoch", "per_update", "before", "after"),
    [
        (300, 100, 1, 100, 100),  # one process, three epochs
        (300, 100, 2, 100, 50),  # two processes, Accelerate's rule, counted on the loader as it was
        (150, 50, 1, None, 50),  # two processes, one step per update, counted on the prepared loader
        (200, 50, 1, None, 100),  # accumulation over 2, four epochs, counted in updates and set so
        (75, 25, 1, 100, 100),  # accumulation over 4, counted in updates
        (130, 100, 1, 100, 100),  # steps that have nothing to do with epochs
        (303, 102, 2, 101, 51),  # two processes, counted on the loader as it was: the last batch is filled up
        (153, 52, 2, 101, 51),  # the same with accumulation over 2: 3 × ceil(101 / 2)
        (408, 136, 8, 130, 17),  # eight processes, counted on the prepared loader and times eight
        (100, 0, 1, 0, 0),
    ],
)
def test_a_schedule_that_fits(
    length: int, steps_per_epoch: int, per_update: int, before: int | None, after: int
) -> None:
    assert describe(length, steps_per_epoch, per_update, before, after) is None


@pytest.mark.parametrize(
    ("length", "steps_per_epoch", "per_update", "before", "after", "fact", "condition"),
    [
        (40, 100, 1, 100, 100, "ends after 0.4 epochs", "whole epochs"),
        (40, 100, 1, None, 100, "ends after 0.4 epochs", "whole epochs"),
        (150, 100, 2, 100, 50, "ends after 1.5 epochs", "3 epochs of 50 batches"),
        (300, 25, 1, 100, 100, "ends after 12 epochs", "3 epochs of 100 batches"),
        (100, 25, 1, 100, 100, "ends after 4 epochs", "1 epoch of 100 batches"),
        # These may be right: four epochs of 50 updates each; a thousand updates, at which the script stops.
        (200, 50, 1, 100, 100, "ends after 4 epochs", "2 epochs of 100 batches"),
        (1000, 34, 1, 100, 100, "ends after 29.4 epochs", "10 epochs of 100 batches"),
    ],
)
def test_a_schedule_that_may_count_something_else_is_described_with_an_if(
    length: int, steps_per_epoch: int, per_update: int, before: int | None, after: int, fact: str, condition: str
) -> None:
    line = describe(length, steps_per_epoch, per_update, before, after)
    assert line is not None
    assert (
        f"{length} steps long, and one epoch advances it by {steps_per_epoch}: it {fact}. If it was meant for" in line
    )
    assert f"If it was meant for {condition}, set its length to epochs × {steps_per_epoch}." in line
    assert "\n" not in line


@given(batches=st.integers(1, 400), processes=st.integers(1, 9), window=st.integers(1, 9), epochs=st.integers(1, 40))
def test_a_right_length_is_never_called_wrong(batches: int, processes: int, window: int, epochs: int) -> None:
    after = -(-batches // processes)
    updates = -(-after // window)
    line = describe(epochs * updates * processes, updates * processes, processes, batches, after)
    assert line is None or f"it ends after {epochs} epoch" in line
    assert describe(epochs * updates, updates, 1, None, after) is None
    if window == 1:
        assert describe(epochs * batches, updates * processes, processes, batches, after) is None


def warmup(step: int, *, num_training_steps: int) -> float:
    return step / num_training_steps


def test_lengths() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert schedule_length(lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=7)) == 7
    assert schedule_length(lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)) == 8
    assert schedule_length(lr_scheduler.PolynomialLR(optimizer, total_iters=9)) == 9
    assert schedule_length(lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=9)) == 9
    partial = functools.partial(warmup, num_training_steps=11)
    assert schedule_length(lr_scheduler.LambdaLR(optimizer, partial)) == 11
    assert schedule_length(lr_scheduler.StepLR(optimizer, step_size=3)) is None
    assert schedule_length(object()) is None


def test_a_warm_up_ends_early_on_purpose() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert schedule_length(lr_scheduler.LinearLR(optimizer, total_iters=9)) is None
    assert schedule_length(lr_scheduler.ConstantLR(optimizer, total_iters=9)) is None
