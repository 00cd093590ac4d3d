"""Two ranks that torchrun has started, and of which the last ends the job: ``summary.py HOW``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from lockstep import Accelerator


def end(how: str) -> None:
    """Called on: the last rank."""
    if how == "exits":
        sys.exit(3)  # mark: exits
    if how == "guard":
        dist.all_reduce(torch.ones(2))  # mark: all_reduce
    raise ValueError("sample 11 is broken")  # mark: raises


def main(how: str) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.wait_for_everyone()
    if accelerator.process_index == accelerator.num_processes - 1:
        end(how)
    if how == "guard":
        dist.barrier()  # mark: barrier
    accelerator.wait_for_everyone()


(record(main) if sys.argv[1] == "record" else main)(sys.argv[1])
