"""Two machines with two ranks each; the ranks of one agree with each other, and not with those of the other."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from lockstep import Accelerator

SCENARIO = sys.argv[1]
accelerator = Accelerator(cpu=True)
first = accelerator.process_index < 2
accelerator.gather(torch.ones(2))  # mark: together
if SCENARIO == "shapes":
    accelerator.gather(torch.ones(2 if first else 3))  # mark: shapes
elif SCENARIO == "dtypes":
    accelerator.reduce(torch.ones(2, dtype=torch.float32 if first else torch.float64))  # mark: dtypes
elif SCENARIO == "raw":
    if first:
        dist.all_reduce(torch.ones(2))  # mark: all_reduce
    else:
        dist.barrier()  # mark: barrier
elif SCENARIO == "under main":
    if first:
        accelerator.gather(torch.ones(2))  # mark: gather
elif SCENARIO == "sleeps" and not first:
    time.sleep(600)  # mark: sleeps
accelerator.wait_for_everyone()  # mark: end
accelerator.print("all done")
