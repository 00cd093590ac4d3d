"""The monitor that is always on, on a training made by hand: no accelerator."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lockstep.config.choices import NanPolicy
from lockstep.errors import NumericsError
from lockstep.numerics.policy import NanMonitor
from lockstep.training.state import TrainingState
from tests.unit.training.states import make_state, train

GOOD, BAD = torch.ones(4, 2), torch.full((4, 2), math.nan)


def monitored(policy: NanPolicy, folder=None) -> TrainingState:
    model = nn.Linear(2, 1)
    state = make_state(model)
    state.monitor = NanMonitor(policy, state, folder)
    state.monitor.follow(model, trained=True)
    state.optimizers[0]._gate = state.monitor if state.monitor.guards else None
    return state


def test_warn_reports_and_updates(caplog: pytest.LogCaptureFixture, tmp_path) -> None:
    state = monitored(NanPolicy.WARN, tmp_path)
    train(state, GOOD)
    assert caplog.text == ""
    train(state, BAD)
    assert "the loss is nan" in caplog.text
    assert any("the loss is nan" in path.read_text() for path in tmp_path.iterdir())
    assert all(bool(parameter.isnan().all()) for parameter in state.parameters())


def test_skip_drops_the_update(caplog: pytest.LogCaptureFixture) -> None:
    state = monitored(NanPolicy.SKIP)
    train(state, GOOD)
    before = [parameter.clone() for parameter in state.parameters()]
    train(state, BAD)
    assert state.optimizers[0].step_was_skipped
    assert all(torch.equal(now, then) for now, then in zip(state.parameters(), before, strict=True))
    assert "the update is dropped" in caplog.text
    train(state, GOOD)
    assert not state.optimizers[0].step_was_skipped


def test_stop_raises() -> None:
    state = monitored(NanPolicy.STOP)
    with pytest.raises(NumericsError, match="nan_policy='stop': the gradient of update 1 is nan"):
        train(state, BAD)


def test_a_batch_that_is_computed_again_counts_as_it_comes_out_then() -> None:
    monitor = monitored(NanPolicy.SKIP).monitor
    mark = monitor.mark()
    assert bool(monitor.loss(torch.tensor(math.nan)).isnan())
    monitor.forget_since(mark)
    assert not monitor.refuses([nn.Parameter(torch.ones(1))])


def test_a_model_that_is_given_up_is_let_go_of() -> None:
    state = monitored(NanPolicy.WARN)
    (model,) = state.models
    assert len(model._forward_pre_hooks) == 1
    state.clear()
    assert len(model._forward_pre_hooks) == 0
