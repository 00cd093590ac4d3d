"""A training with loader workers that lasts until the file that it is given is there: ``loading.py FILE [STRATEGY]``.

STRATEGY is how torch shares memory between a loader and its workers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

from lockstep import Accelerator

end = Path(sys.argv[1])
torch.multiprocessing.set_sharing_strategy(*sys.argv[2:3] or ["file_descriptor"])
accelerator = Accelerator(cpu=True)


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100,), index / len(self))


model = torch.nn.Linear(100, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Samples(), batch_size=8, num_workers=2))
for step, batch in enumerate(loader):
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        if accelerator.is_main_process and end.exists():
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
accelerator.print("all done")
