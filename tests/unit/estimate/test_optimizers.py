from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.estimate.optimizers import NAMED, cost, maker


def kept(optimizer: torch.optim.Optimizer) -> int:
    leaves = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(leaf.untyped_storage().nbytes() for leaf in leaves)


@pytest.mark.parametrize("name", NAMED)
@settings(max_examples=5, deadline=None)
@given(shapes=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3))
def test_the_state_is_that_of_the_real_optimizer(name: str, shapes: list[list[int]]) -> None:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    found = cost(parameters, maker(name))
    optimizer = NAMED[name](parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert found.state == kept(optimizer)


def test_a_step_needs_room_for_its_largest_tensor() -> None:
    parameters = [nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(10))]
    assert cost(parameters, maker("adamw")).step >= 4000
    assert cost(parameters, maker("sgd")).step == 0


def test_a_function_of_ones_own() -> None:
    parameters = [nn.Parameter(torch.ones(1000))]
    own = maker(lambda given: torch.optim.Adam(given, amsgrad=True))
    assert cost(parameters, own).state == 3 * 4000 + 4


def test_on_cuda_all_tensors_are_handled_at_once() -> None:
    parameters = [nn.Parameter(torch.ones(1000)) for _ in range(5)]
    assert cost(parameters, maker("adamw", "cuda")).step >= 5 * 4000
    assert cost(parameters, maker("adamw", "cuda")).state == cost(parameters, maker("adamw")).state
