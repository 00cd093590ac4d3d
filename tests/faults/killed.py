"""A training in which a signal ends a rank, the last unless told which: ``killed.py WHERE [RANK]``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep import Accelerator

WHERE = sys.argv[1]
STEP = 3
"""Updates that have been made by then."""
accelerator = Accelerator(cpu=True)
dies = accelerator.process_index == int(*sys.argv[2:] or [accelerator.num_processes - 1])
made: list[int] = []
"""The updates made so far."""


def kill(where: str) -> None:
    """End that rank here, if this is the place and the time."""
    if where == WHERE and dies and len(made) == STEP:
        os.kill(os.getpid(), signal.SIGKILL)


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        kill("data")
        return torch.ones(3)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 9)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        kill("forward")
        output: torch.Tensor = self.layer(batch)
        output.register_hook(lambda gradient: kill("backward"))
        return output


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Samples(), batch_size=2))
accelerator.register_save_state_pre_hook(lambda *_: kill("checkpoint"))
for batch in loader:  # mark: data
    loss = model(batch).mean()  # mark: forward
    accelerator.backward(loss)  # mark: backward
    optimizer.step()
    optimizer.zero_grad()
    made.append(len(made))
    kill("between steps")
    if len(made) == STEP and WHERE == "checkpoint":
        accelerator.save_state(tempfile.mkdtemp())  # mark: checkpoint
    if len(made) == STEP and WHERE == "torch's own":
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()
    if len(made) == STEP and WHERE == "collective":
        if dies:
            threading.Timer(0.5, kill, ["collective"]).start()
        else:
            time.sleep(20)
        accelerator.wait_for_everyone()  # mark: collective
    if len(made) == STEP and WHERE == "gloo aborts" and not dies:
        torch.distributed.all_reduce(torch.ones(2))  # mark: gloo aborts
    if len(made) == STEP and WHERE == "native code" and dies:
        ctypes.string_at(0)  # mark: native code
    if len(made) == STEP and WHERE == "sleep" and dies:
        threading.Timer(2.0, kill, ["sleep"]).start()
        time.sleep(20)  # mark: sleep
accelerator.print("all done")
