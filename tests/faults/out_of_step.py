"""A training script that falls out of step in the way its argument says. Line numbers are looked up by the marks.

The odd rank is the last one. What it does for a while takes as many seconds as the second argument says. When the fault
happens is printed: ``fault at`` and the time, by each rank that takes part in it; the latest counts.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lockstep import Accelerator, DataLoaderConfiguration

SCENARIO = sys.argv[1]
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 600.0
STUCK = ("sleeps", "endless loop", "stuck in the loader")
UNEVEN = DataLoaderConfiguration(even_batches=False)
accelerator = Accelerator(cpu=True, dataloader_config=UNEVEN if SCENARIO == "fewer batches" else None)
rank = accelerator.process_index
odd = rank == accelerator.num_processes - 1


def fault() -> None:
    sys.stdout.write(f"fault at {time.time():.3f}\n")
    sys.stdout.flush()


def is_stuck(scenario: str) -> bool:
    """Whether this rank is stuck in that way: the odd one, or ranks 1, 2 and 3, each in its own."""
    if SCENARIO == "each stuck in its own way":
        return rank == 1 + STUCK.index(scenario)
    return odd and scenario == SCENARIO


def comes(scenario: str, step: int) -> bool:
    """Whether this is the rank and the step of that scenario's fault."""
    here = step == 2 and (is_stuck(scenario) if scenario in STUCK else odd and scenario == SCENARIO)
    if here:
        fault()
    return here


def call() -> None:
    """The scenarios that need no model."""
    if SCENARIO == "shapes":
        fault()
        accelerator.gather(torch.ones(3 if odd else 2))  # mark: shapes
    elif SCENARIO == "dtypes":
        fault()
        accelerator.gather(torch.ones(2, dtype=torch.float64 if odd else torch.float32))  # mark: dtypes
    elif SCENARIO == "structures":
        fault()
        accelerator.gather({"a": torch.ones(2)} if odd else (torch.ones(2),))  # mark: structures
    elif SCENARIO == "operations":
        fault()
        if odd:
            accelerator.reduce(torch.ones(2))  # mark: reduce
        else:
            accelerator.gather(torch.ones(2))  # mark: gather
    elif SCENARIO == "opposite order":
        fault()
        if accelerator.is_last_process:  # mark: opposite
            accelerator.gather(torch.ones(2))  # mark: gather first
            accelerator.reduce(torch.ones(2))
        else:
            accelerator.reduce(torch.ones(2))  # mark: reduce first
            accelerator.gather(torch.ones(2))
    elif SCENARIO == "gather under main":
        fault()
        if accelerator.is_main_process:
            accelerator.gather(torch.ones(2))  # mark: gather under main
        accelerator.wait_for_everyone()  # mark: after gather
    elif SCENARIO == "raw":
        accelerator.wait_for_everyone()
        fault()
        if odd:
            dist.all_reduce(torch.ones(2))  # mark: all_reduce
        else:
            dist.barrier()  # mark: barrier
    elif SCENARIO == "alone for a while" and accelerator.is_main_process:
        fault()
        time.sleep(SECONDS)  # mark: alone


call()


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 60 if SCENARIO == "fewer batches" else 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 60 and is_stuck("stuck in the loader"):  # in a batch of the last rank of 2 or 4
            fault()
            time.sleep(SECONDS)  # mark: loader
        return torch.full((4,), float(index))


model = torch.nn.Linear(4, 2)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(Samples(), batch_size=4)
)
if SCENARIO == "fewer batches of its own":
    loader = [torch.ones(4, 4)] * (7 if odd else 8)


def loss_of(batch: torch.Tensor, step: int) -> torch.Tensor:
    if comes("raises and swallows it", step):
        raise ValueError("sample 11 is broken")
    return model(batch).sum()  # mark: forward


def train() -> None:
    for step, batch in enumerate(loader):  # mark: loop
        if comes("leaves the loop early", step):
            break
        if comes("skips an update", step):
            continue
        if comes("raises", step):
            raise ValueError("sample 11 is broken")  # mark: raises
        if comes("exits with 0", step):
            sys.exit(0)
        if comes("exits with 3", step):
            sys.exit(3)  # mark: exits
        if comes("asked to end", step):
            os.kill(os.getpid(), signal.SIGTERM)
        if comes("killed", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if comes("sleeps", step):
            time.sleep(SECONDS)  # mark: sleeps
        if comes("endless loop", step):
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:  # mark: loops
                pass
        try:
            loss = loss_of(batch, step)
        except ValueError:
            continue
        if comes("skips a NaN loss", step):
            continue
        accelerator.backward(loss)  # mark: backward
        if comes("skips a step", step):
            optimizer.zero_grad()
            continue
        optimizer.step()  # mark: step
        optimizer.zero_grad()
    if odd and SCENARIO.startswith("fewer batches"):
        fault()


if SCENARIO == "barrier under main":
    fault()
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()  # mark: barrier under main
if SCENARIO == "raw left out":
    accelerator.wait_for_everyone()
    fault()
    if not odd:
        dist.all_reduce(torch.ones(2))  # mark: left out
    for _ in range(3):
        dist.all_reduce(torch.ones(4))  # mark: after left out
train()
accelerator.wait_for_everyone()  # mark: end
accelerator.print("all done")
