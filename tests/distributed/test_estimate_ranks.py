"""``estimate_memory`` in a job of several ranks: any rank may call it by itself."""

from __future__ import annotations

import torch
from torch import nn

from lockstep import Accelerator
from lockstep.testing import run_ranks
from lockstep.utils import estimate_memory


def measured_alone_between_steps() -> tuple[int, bool, list[float]]:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    plain = estimate_memory(model, torch.randn(4, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    same = True
    for _ in range(2):
        if accelerator.is_main_process:
            same = same and estimate_memory(model, torch.randn(4, 8)) == plain
        accelerator.backward(model(torch.full((4, 8), accelerator.process_index + 1.0)).sum())
        if accelerator.is_main_process:
            same = same and estimate_memory(model, torch.randn(4, 8)) == plain
        optimizer.step()
        optimizer.zero_grad()
    return plain.gradients, same, accelerator.unwrap_model(model)[2].weight.flatten().tolist()


def test_one_rank_may_measure_by_itself() -> None:
    (size, same, weights), (_, _, others) = run_ranks(measured_alone_between_steps, 2)
    assert size == 4 * (8 * 16 + 16 + 16 * 2 + 2)
    assert same
    assert weights == others
