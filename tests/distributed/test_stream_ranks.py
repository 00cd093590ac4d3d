"""Streams read by worker processes, on real ranks: an epoch has as many steps as its length; repeats are reported."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep import Accelerator, DataLoaderConfiguration
from lockstep.testing import run_ranks
from tests.ranks import in_soak


class Lines(IterableDataset[Any]):
    """Numbers, split between workers; of known length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.sample(number) for number in range(worker, self.count, workers))

    def sample(self, number: int) -> Any:
        return torch.tensor(float(number))


class Whole(Lines):
    """Not split."""

    def __iter__(self) -> Iterator[Any]:
        return (self.sample(number) for number in range(self.count))


class Locked(Lines):
    """Samples that no process can send to another."""

    def sample(self, number: int) -> Any:
        return number, threading.Lock()


def numbers(items: list[Any]) -> Tensor:
    return torch.tensor([float(number) for number, _ in items])


class Placed(Lines):
    """A stream that keeps its own state, as torchdata's loader asks for."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        mine = range(worker, self.count, workers)
        while self.at < len(mine):
            self.at += 1
            yield self.sample(mine[self.at - 1])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def trained(workers: int, options: dict[str, Any]) -> tuple[int, int, list[float], list[float]]:
    """Steps and length of an epoch, its learning rates, and the samples that metrics got."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    net = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(Lines(40), batch_size=4, num_workers=workers)
    )
    # Prepared, it moves once for each process.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, len(loader) * accelerator.num_processes)
    schedule = accelerator.prepare(schedule)
    steps, rates, seen = 0, [], []
    for batch in loader:
        accelerator.backward(model(batch.unsqueeze(1)).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
        seen += accelerator.gather_for_metrics(batch).tolist()
        steps += 1
    return steps, len(loader), rates, seen


@pytest.mark.parametrize("world_size", [2, *in_soak(3)])
@pytest.mark.parametrize("options", [{}, {"dispatch_batches": False}], ids=["dispatched", "each reads"])
def test_an_epoch_has_as_many_steps_as_its_length(world_size: int, options: dict[str, Any]) -> None:
    for steps, length, rates, seen in run_ranks(trained, world_size, 2, options, timeout=120):
        assert steps == length == math.ceil(40 / 4 / world_size)
        assert rates == sorted(rates, reverse=True)  # a schedule that goes on past its end climbs again
        assert rates[-1] == pytest.approx(0)
        assert sorted(seen) == list(range(40))


def reported(kind: str, count: int, workers: int) -> list[str]:
    import logging

    lines: list[str] = []

    class Catch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, catch = logging.getLogger("lockstep.data"), Catch(level=logging.INFO)
    before = logger.level
    logger.addHandler(catch)
    logger.setLevel(logging.INFO)
    try:
        accelerator = Accelerator(cpu=True)
        data = {"lines": Lines, "whole": Whole}[kind](count)
        loader = accelerator.prepare(DataLoader(data, batch_size=4, num_workers=workers))
        for _ in range(2):
            for _ in loader:
                pass
    finally:
        logger.removeHandler(catch)
        logger.setLevel(before)
    return lines


def test_repeats_are_reported_once() -> None:
    first, second = run_ranks(reported, 2, "lines", 43, 2, timeout=120)
    assert second == []
    (line,) = first
    assert "5 samples of 43 were repeated so that all ranks get equally many batches" in line
    assert run_ranks(reported, 2, "lines", 40, 2, timeout=120) == [[], []]
    assert "5 samples of 43" in run_ranks(reported, 2, "lines", 43, 0)[0][0]


def test_a_dataset_that_every_worker_reads_whole_is_named() -> None:
    first, second = run_ranks(reported, 2, "whole", 8, 2, timeout=120)
    assert second == []
    (line,) = first
    assert "each of the 2 workers read all 8 samples of the dataset, so each came 2 times" in line
    assert "get_worker_info" in line


def of_locked(options: dict[str, Any]) -> tuple[int, list[float]]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(Locked(22), batch_size=4, num_workers=2, collate_fn=numbers))
    seen: list[float] = []
    steps = 0
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch).tolist()
        steps += 1
    return steps, seen


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": False}], ids=["dispatched", "each reads"])
def test_samples_that_cannot_be_pickled_stay_with_their_worker(options: dict[str, Any]) -> None:
    (steps, seen), (others, same) = run_ranks(of_locked, 2, options, timeout=120)
    assert steps == others
    assert sorted(seen) == sorted(same) == list(range(22))


def resumed(options: dict[str, Any], kind: str) -> list[Any]:
    """What is wrong when an epoch is continued after each of its steps."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    data = {"lines": Lines, "placed": Placed}[kind]

    def made() -> Any:
        return accelerator.prepare(DataLoader(data(37), batch_size=3, num_workers=2))

    def rest_of(loader: Any) -> list[float]:
        return [item for batch in loader for item in accelerator.gather_for_metrics(batch).tolist()]

    wrong = []
    seen: list[float] = []
    states, firsts = [], []
    loader = made()
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch).tolist()
        states.append(loader.state_dict())
        firsts.append(len(seen))
    if sorted(seen) != list(range(37)) or len(states) != len(loader):
        wrong.append(("whole", len(states), seen))
    steps = (0, len(states) - 3, len(states) - 2, len(states) - 1)
    for at in steps:
        (state,) = accelerator.gather_for_metrics([states[at]])[:1]  # rank 0's, for all
        again = made()
        again.load_state_dict(state)
        # After the last step the next epoch begins.
        found = (seen[: firsts[at]] if at < len(states) - 1 else []) + rest_of(again)
        if sorted(found) != list(range(37)):
            wrong.append((at, sorted(found)))
    return wrong


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lines", {}),
        ("lines", {"dispatch_batches": False}),
        ("placed", {"use_stateful_dataloader": True}),
        ("placed", {"use_stateful_dataloader": True, "dispatch_batches": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value) or "default",
)
def test_an_epoch_is_continued_after_any_step(kind: str, options: dict[str, Any]) -> None:
    assert run_ranks(resumed, 2, options, kind, timeout=180) == [[], []]


def compared(options: dict[str, Any]) -> list[Any]:
    """Cases in which steps or samples are not those of the length."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    wrong = []
    for count, batch_size, drop_last in itertools.product((1, 10, 21), (2, None), (False, True)):
        if batch_size is None and drop_last:
            continue
        kind = {"batch_size": batch_size, "drop_last": drop_last}
        loader = accelerator.prepare(DataLoader(Lines(count), num_workers=2, **kind))
        seen: list[float] = []
        steps = 0
        for batch in loader:
            seen += accelerator.gather_for_metrics(batch.reshape(-1)).tolist()
            steps += 1
        left = count % ((batch_size or 1) * accelerator.num_processes) if drop_last else 0
        if steps != len(loader) or len(seen) != count - left or len(set(seen)) != len(seen):
            wrong.append((count, batch_size, drop_last, steps, len(loader), seen))
    return wrong


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": False}], ids=["dispatched", "each reads"])
def test_steps_of_all_kinds(options: dict[str, Any]) -> None:
    assert run_ranks(compared, 2, options, timeout=180) == [[], []]
