"""One rank calls the model without a backward, and makes up for it with a batch more: all ranks come to the end."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader

from lockstep import Accelerator

UPDATES = 60
accelerator = Accelerator(cpu=True)
odd = accelerator.process_index == accelerator.num_processes - 1
forwards = sys.argv[1] == "forward"
net = torch.nn.Linear(4, 2)
model, optimizer, loader = accelerator.prepare(
    net,
    torch.optim.SGD(net.parameters(), lr=0.01),
    DataLoader(torch.ones(400, 4), batch_size=2),  # type: ignore[arg-type]
)
updates = 0
for batch in loader:
    time.sleep(0.05)
    if odd and updates == 5 and forwards:
        forwards = False
        loss = model(batch).sum()  # mark: forward
        continue
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
    updates += 1
    if updates == UPDATES:
        break
accelerator.wait_for_everyone()
accelerator.print("done: skipping")
