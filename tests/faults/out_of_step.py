"""A training script that falls out of step in the way its argument says. Line numbers are looked up by the marks."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lockstep import Accelerator

SCENARIO = sys.argv[1]
accelerator = Accelerator(cpu=True)
odd = accelerator.process_index == accelerator.num_processes - 1


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if SCENARIO == "stuck in the loader" and odd and index > 32:
            time.sleep(600)  # mark: loader
        return torch.full((4,), float(index))


model = torch.nn.Linear(4, 2)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(Samples(), batch_size=4)
)


def train() -> None:
    for step, batch in enumerate(loader):
        if SCENARIO == "leaves the loop early" and odd and step == 2:
            break
        if SCENARIO == "skips an update" and odd and step == 2:
            continue
        if SCENARIO == "raises" and odd and step == 2:
            raise ValueError("sample 11 is broken")  # mark: raises
        if SCENARIO == "raises and swallows it" and odd and step == 2:
            try:
                accelerator.gather(["not a tensor"])  # a rank that fails before it has entered
            except TypeError:
                continue
        if SCENARIO == "exits with 0" and odd and step == 2:
            sys.exit(0)
        if SCENARIO == "killed" and odd and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if SCENARIO == "sleeps" and odd and step == 2:
            time.sleep(600)  # mark: sleeps
        while SCENARIO == "endless loop" and odd and step == 2:  # mark: loops
            pass
        loss = model(batch).sum()
        accelerator.backward(loss)  # mark: backward
        optimizer.step()
        optimizer.zero_grad()


def call() -> None:
    size = 3 if odd else 2
    if SCENARIO == "shapes":
        accelerator.gather(torch.ones(size))  # mark: shapes
    elif SCENARIO == "dtypes":
        accelerator.gather(torch.ones(2, dtype=torch.float64 if odd else torch.float32))  # mark: dtypes
    elif SCENARIO == "structures":
        accelerator.gather({"a": torch.ones(2)} if odd else (torch.ones(2),))  # mark: structures
    elif SCENARIO == "operations":
        if odd:
            accelerator.reduce(torch.ones(2))  # mark: reduce
        else:
            accelerator.gather(torch.ones(2))  # mark: gather
    elif SCENARIO == "gather under main":
        if accelerator.is_main_process:
            accelerator.gather(torch.ones(2))  # mark: gather under main
        accelerator.wait_for_everyone()  # mark: after gather
    elif SCENARIO == "barrier under main":
        if accelerator.is_main_process:
            accelerator.wait_for_everyone()  # mark: barrier under main
    elif SCENARIO == "raw":
        if odd:
            dist.all_reduce(torch.ones(2))  # mark: all_reduce
        else:
            dist.barrier()  # mark: barrier
    elif SCENARIO == "opposite order":
        if odd:
            accelerator.gather(torch.ones(2))  # mark: gather first
            accelerator.reduce(torch.ones(2))
        else:
            accelerator.reduce(torch.ones(2))  # mark: reduce first
            accelerator.gather(torch.ones(2))
    elif SCENARIO == "a handle for later":
        handle = dist.all_reduce(torch.ones(2), async_op=not odd)
        if not odd:
            time.sleep(float(sys.argv[2]))
            handle.wait()
        else:
            accelerator.print("here")
    elif SCENARIO == "paused":
        for _ in range(200):
            accelerator.gather(torch.ones(2))
            time.sleep(0.02)
    elif SCENARIO == "alone for a while":
        if accelerator.is_main_process:
            time.sleep(float(sys.argv[2]))
        accelerator.wait_for_everyone()  # mark: after


call()
train()
accelerator.wait_for_everyone()  # mark: end
accelerator.print("all done")
