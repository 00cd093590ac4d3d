"""A training script that is as slow as its loaders, which have a worker process each; with "slow", rank 1's is slower.

It runs for two looks at the pace.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep import Accelerator

SECONDS = 34.0
accelerator = Accelerator(cpu=True)
EACH = 0.012 if sys.argv[1] == "slow" and accelerator.process_index == 1 else 0.004


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(EACH)
        return torch.ones(16)


model = torch.nn.Linear(16, 4)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=1e-6), DataLoader(Samples(), batch_size=4, num_workers=1)
)
began = time.monotonic()
for number, batch in enumerate(loader, 1):
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
    if number % 20 == 0 and accelerator.reduce(torch.tensor(time.monotonic() - began), "max") > SECONDS:
        break
time.sleep(1.5)  # two looks of the guard
accelerator.wait_for_everyone()
accelerator.print("all done")
