"""The micro-batch runner on a training made by hand: no accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lockstep import OutOfMemory
from lockstep.memory.microbatch import train_on
from lockstep.optim.monitor import TrainingMonitor
from lockstep.training.state import TrainingState
from tests.unit.training.states import make_state

BATCH = torch.arange(16.0).view(8, 2)


class Losses(TrainingMonitor):
    """Notes how often a loss was looked at, and what was taken back."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def loss(self, loss: Tensor, samples=None) -> Tensor:
        self.seen.append(loss.item())
        return loss

    def mark(self) -> int:
        return len(self.seen)

    def forget_since(self, mark: int) -> None:
        del self.seen[mark:]


def state_of_one_model() -> TrainingState:
    torch.manual_seed(3)
    return make_state(nn.Linear(2, 1))


def run(state: TrainingState, fits: int) -> Tensor:
    """One batch through a model whose forward has room for ``fits`` rows."""

    def compute_loss(rows: Tensor) -> Tensor:
        if len(rows) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return state.models[0](rows).pow(2).mean()

    return train_on(state, BATCH, compute_loss, None, None)


def test_parts_give_the_gradients_of_the_whole_batch() -> None:
    whole, parts = state_of_one_model(), state_of_one_model()
    losses = run(whole, fits=8), run(parts, fits=2)
    assert (whole.microbatch_size, parts.microbatch_size) == (None, 2)
    assert torch.allclose(*losses)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert one.grad is not None
        assert torch.allclose(one.grad, other.grad)
    assert whole.updates == parts.updates == 1


def test_a_size_that_was_found_stays() -> None:
    state = state_of_one_model()
    state.monitor = monitor = Losses()
    run(state, fits=4)
    assert len(monitor.seen) == 2  # what did not fit does not count
    run(state, fits=4)
    assert len(monitor.seen) == 4
    assert state.updates == 2


def test_gradients_of_before_stay_when_nothing_fits() -> None:
    state = state_of_one_model()
    run(state, fits=8)
    before = [parameter.grad.clone() for parameter in state.parameters()]
    with pytest.raises(OutOfMemory, match="even parts of 1 sample do not fit"):
        run(state, fits=0)
    assert all(torch.equal(item.grad, then) for item, then in zip(state.parameters(), before, strict=True))
    assert state.updates == 1
