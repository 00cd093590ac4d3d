"""A mismatch that debug mode raises on all ranks, and that the script catches: then it goes on."""

from __future__ import annotations

import time

import torch

from lockstep import Accelerator, DistributedOperationException

accelerator = Accelerator(cpu=True, debug=True)
try:
    accelerator.gather(torch.ones(2 + accelerator.process_index))
except DistributedOperationException:
    pass
else:
    raise AssertionError
for _ in range(6):
    time.sleep(0.5)
    accelerator.gather(torch.ones(2))
accelerator.print("went on")
