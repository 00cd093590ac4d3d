"""Three ranks that no launcher watches: rank 0 is killed, the other two go on by themselves and fall out of step."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from lockstep import Accelerator

accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
pair = dist.new_group([1, 2])
accelerator.wait_for_everyone()
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(2)
if rank == 1:
    dist.all_reduce(torch.ones(2), group=pair)  # mark: all_reduce
else:
    dist.barrier(group=pair)  # mark: barrier
