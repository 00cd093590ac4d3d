"""What a scheduler leaves on an optimizer."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LambdaLR

from lockstep.torch_internals import optim


def test_an_optimizer_with_a_scheduler_is_known() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    assert not optim.has_scheduler(optimizer)
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    assert optim.has_scheduler(optimizer)
    before = scheduler.state_dict()["_step_count"]
    optim.count_steps(scheduler, 3)
    assert scheduler.state_dict()["_step_count"] == before + 3
    optim.count_steps(object(), 1)  # one of another make
