"""A training that prints a lot, ``writing.py SCENARIO``: what becomes of a job whose run directory fails.

It prints "under way" after a few steps, and goes on when the file GO, next to the run directory, is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from lockstep import Accelerator

scenario = sys.argv[1]
go = Path(os.environ["LOCKSTEP_TEST_GO"])
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(20):
    accelerator.backward(model(torch.ones(2, 3)).mean())
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} of rank {accelerator.process_index} {'.' * 1000}", flush=True)
    if step == 3:
        accelerator.print("under way", flush=True)
        while scenario != "before" and not go.exists():
            time.sleep(0.05)
if scenario == "raises" and accelerator.process_index == 1:
    raise ValueError("of rank 1")
accelerator.wait_for_everyone()
accelerator.print("all done")
