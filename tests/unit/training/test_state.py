"""What a training state counts, remembers and lets go of."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lockstep import UsageError
from lockstep.optim.monitor import TrainingMonitor
from lockstep.training.step import accumulate
from tests.unit.training.states import make_state, train


class Retaining(TrainingMonitor):
    """Notes which models were left."""

    def __init__(self) -> None:
        self.kept: list[list[nn.Module]] = []

    def retain(self, models) -> None:
        self.kept.append(list(models))


def test_updates_are_counted_and_reported() -> None:
    state = make_state(nn.Linear(2, 1))
    seen: list[int] = []
    state.on_update = lambda: seen.append(state.updates)
    train(state, torch.ones(4, 2))
    train(state, torch.ones(4, 2))
    assert (state.updates, seen) == (2, [1, 2])


def test_a_window_of_two_micro_batches_is_one_update() -> None:
    state = make_state(nn.Linear(2, 1), steps=2)
    for _ in range(4):
        with accumulate(state, state.models):
            train(state, torch.ones(4, 2))
    assert state.updates == 2


def test_parameters_come_once() -> None:
    model = nn.Linear(2, 1)
    state = make_state(model)
    state.models.append(nn.Sequential(model))
    assert [id(item) for item in state.parameters()] == [id(item) for item in model.parameters()]


def test_what_was_prepared_since_a_mark_is_forgotten() -> None:
    first, second = nn.Linear(2, 1), nn.Linear(3, 1)
    state = make_state(first)
    state.monitor = monitor = Retaining()
    mark = state.mark()
    state.models.append(second)
    state.optimizers.append(make_state(second).optimizers[0])
    state.forget_since(mark)
    assert state.models == [first]
    assert len(state.optimizers) == 1
    assert list(state.given_up) == [second]
    assert monitor.kept == [[first]]


def test_a_cleared_state_holds_nothing() -> None:
    model = nn.Linear(2, 1)
    state = make_state(model)
    train(state, torch.ones(4, 2))
    state.clear()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert (state.models, state.optimizers, state.parameters()) == ([], [], [])


def test_reproducible_needs_a_batch_to_weight_by() -> None:
    with pytest.raises(UsageError, match="no prepared loader is being iterated"):
        make_state(reproducible=True).items_of_batch()
    assert make_state().items_of_batch() is None
