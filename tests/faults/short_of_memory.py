"""A job in which rank 1 runs out of memory: ``short_of_memory.py recovers|deadlock|uncaught``."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, find_executable_batch_size
from tests.faults.exhausted import Limited

scenario = sys.argv[1]
accelerator = Accelerator(cpu=True)
late = accelerator.process_index == 1


class Net(nn.Module):
    """One wide layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 4096)
        self.narrow = nn.Linear(4096, 1)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.wide(x))
        self.forwards += 1
        if scenario == "uncaught" and late and self.forwards == 3:
            with Limited(64 << 20):
                hidden = hidden.repeat(1000, 1)
        return self.narrow(hidden)


def train(size: int) -> int:
    """An epoch in batches of this size."""
    accelerator.free_memory()
    net = Net()
    data = TensorDataset(torch.randn(192, 64), torch.randn(192, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=size))
    for step, (x, y) in enumerate(loader):
        if late and step == 2 and scenario == "recovers" and size == 8:
            time.sleep(2.5)  # the other rank waits in its backward
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if step == 2 and scenario == "deadlock":
            dist.barrier() if late else dist.all_reduce(x)
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return size


if scenario == "uncaught":
    train(32)
else:
    print(f"found {find_executable_batch_size(train, starting_batch_size=8)()}")
