"""A training that does not end by itself; prints when it is under way."""

from __future__ import annotations

import time

import torch

from lockstep import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3000):
    accelerator.backward(model(torch.ones(2, 3)).mean())  # mark: backward
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        print("under way", flush=True)
    time.sleep(0.1)
