"""A prepared optimizer clears gradients as the one inside it would."""

from __future__ import annotations

import torch
from torch import nn

from lockstep import Accelerator


class Fussy(torch.optim.SGD):
    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


def test_an_optimizer_with_a_way_of_its_own_keeps_it() -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(2, 2)
    inner = Fussy(net.parameters(), lr=0.1)
    optimizer = accelerator.prepare(inner)
    optimizer.zero_grad()
    assert inner.cleared == 1


def test_gradients_are_zeroed_in_place_when_asked() -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(2, 2)
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    net(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert net.weight.grad is not None
    assert not net.weight.grad.any()
