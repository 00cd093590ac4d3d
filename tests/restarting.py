"""A training script that dies where it is told to, for tests of restarts."""

from __future__ import annotations

import random

TRAIN = """
import os, signal, sys
import torch
from lockstep import Accelerator

# argv: a file with a mark for each death so far, then for each attempt who dies at which step.
marks = open(sys.argv[1]).read() if os.path.exists(sys.argv[1]) else ""
fates = [tuple(map(int, fate.split(":"))) for fate in sys.argv[2:]]
accelerator = Accelerator(cpu=True)
fate = fates[len(marks)] if len(marks) < len(fates) else None
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(20):
    if fate == (accelerator.process_index, step):
        with open(sys.argv[1], "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.backward(model(torch.randn(8, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
who = f"{os.uname().nodename}:{accelerator.process_index}:{os.environ['GLOO_SOCKET_IFNAME']}"
sys.stdout.write(f"{who} {ranks} after {len(marks)} kills\\n")
"""


def fates(kills: int, ranks: int, seed: int) -> list[str]:
    """Who dies at which step, one for each attempt."""
    dice = random.Random(seed)
    return [f"{dice.randrange(ranks)}:{dice.randrange(20)}" for _ in range(kills)]
