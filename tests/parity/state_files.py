"""Run by a test in a process of its own: whole states that one library saved and the other loads, to the bit."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from torch import nn

import lockstep


def prepared(library: Any, seed: int) -> Any:
    """An accelerator of the library with two models, two optimizers and a scheduler, some updates in."""
    accelerator = library.Accelerator(cpu=True)
    torch.manual_seed(seed)
    models = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1, dtype=torch.float64)]
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), lr=0.1),
        torch.optim.SGD(
            [{"params": [models[1].weight]}, {"params": [models[1].bias], "lr": 0.5}], momentum=0.9, lr=0.1
        ),
    ]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.5, total_steps=50)
    *things, scheduler = accelerator.prepare(*models, *optimizers, scheduler)
    for _ in range(3):
        loss = things[1](things[0](torch.randn(5, 3)).double()).sum()
        accelerator.backward(loss)
        for optimizer in things[2:]:
            optimizer.step()
        scheduler.step()
    return accelerator, things, scheduler


def everything(things: Any, scheduler: Any) -> list[Any]:
    tensors = [value for thing in things[:2] for value in thing.state_dict().values()]
    for optimizer in things[2:]:
        tensors += [torch.as_tensor(value) for state in optimizer.state.values() for value in state.values()]
    rates = [group["lr"] for optimizer in things[2:] for group in optimizer.param_groups]
    return [*(tensor.double().flatten().tolist() for tensor in tensors), rates, scheduler.get_last_lr()]


def main(folder: Path) -> None:
    for writer, reader in ((accelerate, lockstep), (lockstep, accelerate)):
        for safe in (True, False):
            place = folder / f"{writer.__name__}-{safe}"
            one, things, scheduler = prepared(writer, 1)
            one.save_state(str(place), safe_serialization=safe)
            drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
            other, others, other_scheduler = prepared(reader, 2)
            assert everything(others, other_scheduler) != everything(things, scheduler)
            other.load_state(str(place))
            assert everything(others, other_scheduler) == everything(things, scheduler), place
            assert [torch.rand(()).item(), random.random(), np.random.rand()] == drawn, f"generators of {place}"
            names = {path.name for path in place.iterdir()} - {"lockstep_manifest.json", "lockstep_state.json"}
            print(writer.__name__, safe, sorted(names))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
