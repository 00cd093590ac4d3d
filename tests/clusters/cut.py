"""A training of some steps that prints its weights in the end: ``cut.py STEPS TIMEOUT``, with the group's timeout."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch

from lockstep import Accelerator, InitProcessGroupKwargs

steps, seconds = int(sys.argv[1]), float(sys.argv[2])
timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))
accelerator = Accelerator(cpu=True, kwargs_handlers=[timeout])
model = torch.nn.Linear(3, 1)
torch.nn.init.constant_(model.weight, 1.0)
torch.nn.init.constant_(model.bias, 0.0)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(steps):
    accelerator.backward(model(torch.full((2, 3), accelerator.process_index + 1.0)).mean())
    optimizer.step()
    optimizer.zero_grad()
    if step == 3:
        print("under way", flush=True)
    time.sleep(0.05)
print("weights", [round(value, 3) for value in model.module.weight.flatten().tolist()], flush=True)
