"""A training script in which rank 1 is slower than the others, in the phase that its argument names.

The second argument says for how many seconds the guard is to look at it in the end.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep import Accelerator

PHASE = sys.argv[1]
accelerator = Accelerator(cpu=True)


def maybe_wait(phase: str) -> None:
    if phase == PHASE and accelerator.process_index == 1:
        time.sleep(0.05)


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8 * 70 * accelerator.num_processes

    def __getitem__(self, index: int) -> Tensor:
        if index % 8 == 0:
            maybe_wait("data")
        return torch.full((16,), float(index))


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        maybe_wait("forward")
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        maybe_wait("backward")
        return gradient


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = Through.apply(self.first(inputs))
        result: Tensor = self.second(hidden)
        return result


model = Net()
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=1e-6), DataLoader(Samples(), batch_size=8)
)
for batch in loader:
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
time.sleep(float(sys.argv[2]) if sys.argv[2:] else 1.5)  # two looks of the guard
accelerator.wait_for_everyone()
accelerator.print("all done")
