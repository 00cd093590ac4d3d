"""What a loader's worker processes do."""

from __future__ import annotations

import multiprocessing
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.blackbox.box import NoBox
from lockstep.blackbox.step_clock import StepClock
from lockstep.config.handlers import DataLoaderConfiguration
from lockstep.data.current_batch import CurrentBatch
from lockstep.data.prepare import prepare_loader
from lockstep.torch_internals.data_loader import busy_share

FORK = multiprocessing.get_context("fork")


class Gated(Dataset[Tensor]):
    """Gives its samples once the gate is open."""

    def __init__(self) -> None:
        self.gate = FORK.Event()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, place: int) -> Tensor:
        self.gate.wait(30)
        return torch.tensor(place)


def comes_to(workers: Any, share: float) -> bool:
    until = time.monotonic() + 20
    while workers() != share and time.monotonic() < until:
        time.sleep(0.01)
    return bool(workers() == share)


@pytest.mark.parametrize("stateful", [False, True])
def test_workers_are_busy_until_all_that_was_asked_for_is_read(stateful: bool) -> None:
    kind: Any = DataLoader
    if stateful:
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    data = Gated()
    batches = iter(kind(data, batch_size=2, num_workers=2, multiprocessing_context=FORK))
    workers = busy_share(batches)
    assert workers is not None
    assert workers() == 1.0
    data.gate.set()
    assert comes_to(workers, 0.0)
    data.gate.clear()
    next(batches)  # one worker is asked for another batch
    assert comes_to(workers, 0.5)
    data.gate.set()
    assert comes_to(workers, 0.0)


def test_a_rank_that_reads_by_itself_has_none() -> None:
    assert busy_share(iter(DataLoader(torch.arange(4)))) is None


def test_the_clock_sees_the_workers_of_the_innermost_loop() -> None:
    clock = StepClock()
    group: Any = SimpleNamespace(rank=0, world_size=1, scopes=0, clock=clock, box=NoBox())
    current_batch = CurrentBatch()  # one for all loaders, as an accelerator has

    def prepare(workers: int) -> Any:
        plain: Any = DataLoader(torch.arange(4), num_workers=workers)  # type: ignore[arg-type]
        return prepare_loader(plain, group, DataLoaderConfiguration(), current_batch=current_batch)

    for _ in prepare(1):
        outer = clock.workers
        assert outer is not None
        for _ in prepare(0):
            assert clock.workers is None
            break
        assert clock.workers is outer
        break
    assert clock.workers is None
