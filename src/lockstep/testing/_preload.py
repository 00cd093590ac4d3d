"""What the fork server imports once, so that no rank has to.

The server forks ranks, so nothing imported here may start a thread: it would be missing from every rank.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

# The first optimizer step imports torch._dynamo: 1 s in each rank, or once here.
for _name in (
    "numpy.random",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "lockstep.testing._rank",
    "lockstep.accelerator",
):
    # A module that is missing or broken fails in the rank that needs it, where the error is seen. Here it would end
    # the server, and every start with it.
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

# Ranks share these objects with the server, and their collections have no need to go through them again.
gc.collect()
gc.freeze()
