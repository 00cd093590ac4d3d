"""Models to forecast, and what training them really takes on the CPU.

``python -m tests.unit.memory.peaks`` prints, as JSON, the growth of each one's resident memory (VmHWM, kept by the
kernel) over two steps of AdamW, each in a process of its own. That counts everything, also what kernels take for
themselves; the profiler's count, which the ledger behind the forecast resembles, would not.

Run it with MALLOC_MMAP_THRESHOLD_=65536: glibc then gives freed memory back at once. By default it keeps much of it,
more or less from run to run, which is its own affair and not what the training needs (see docs/memory.md).
With the argument ``large`` it is the models whose tensors are too large for glibc to keep.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Tokens(nn.Module):
    """A language model: causal attention, dropout, a head over the vocabulary."""

    def __init__(self, width: int, layers: int, vocabulary: int = 4000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True, norm_first=True),
            layers,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.body(self.embed(tokens), mask=mask, is_causal=True))


def mlp(width: int) -> nn.Module:
    sizes = [784, width, width, width, 10]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def cnn(channels: int) -> nn.Module:
    def block(given: int, taken: int) -> list[nn.Module]:
        return [nn.Conv2d(given, taken, 3, padding=1), nn.BatchNorm2d(taken), nn.ReLU()]

    return nn.Sequential(
        *block(3, channels),
        *block(channels, channels),
        nn.MaxPool2d(2),
        *block(channels, 2 * channels),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, 10),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    build: Callable[..., nn.Module]
    full: tuple[int, ...]
    small: tuple[int, ...]
    """Sizes for a first run, in which libraries load their code."""
    batch: Callable[[int], tuple[Tensor, Tensor]]
    batch_size: int


CASES = {
    "mlp": Case(
        build=mlp,
        full=(1024,),
        small=(32,),
        batch=lambda size: (torch.randn(size, 784), torch.zeros(size, dtype=torch.int64)),
        batch_size=1024,
    ),
    "cnn": Case(
        build=cnn,
        full=(32,),
        small=(8,),
        batch=lambda size: (torch.randn(size, 3, 64, 64), torch.zeros(size, dtype=torch.int64)),
        batch_size=16,
    ),
    "transformer": Case(
        build=Tokens,
        full=(256, 2),
        small=(32, 1),
        batch=lambda size: (torch.zeros(size, 128, dtype=torch.int64), torch.zeros(size, 128, dtype=torch.int64)),
        batch_size=4,
    ),
}

LARGE = {
    "mlp": replace(CASES["mlp"], full=(3072,), batch_size=3072),
    "cnn": replace(CASES["cnn"], full=(64,), batch_size=64),
}
"""Their large tensors have more than 32 MiB, which is the most that glibc takes from its heap."""


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def train(model: nn.Module, batch: Any, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def measured(case: Case) -> int:
    train(case.build(*case.small), case.batch(2))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew from what is resident now
    before = _status("VmRSS")
    train(case.build(*case.full), case.batch(case.batch_size))
    return _status("VmHWM") - before


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def in_a_fork(case: Case) -> int:
    """Nothing of one case must be left for the next to use again."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(measured(case)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="ascii") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return int(said)


if __name__ == "__main__":
    chosen = LARGE if "large" in sys.argv else CASES
    json.dump({name: in_a_fork(case) for name, case in chosen.items()}, sys.stdout)
