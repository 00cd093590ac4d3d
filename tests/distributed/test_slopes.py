"""Nothing piles up: memory, descriptors, threads and keys of the store, over many steps, saves, cycles and sessions.

In `make test` a few hundred iterations find what Python keeps, block by block; `make soak-long` has the counts at which
native memory shows too.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, current
from lockstep.config.handlers import ProjectConfiguration
from lockstep.testing import run_ranks
from lockstep.testing.ranks import Ranks
from tests import slopes
from tests.durations import Note
from tests.slopes import Usage

ALONE = dict.fromkeys(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
)
"""A process that nobody launched."""
BATCHES = 32
"""In an epoch of each rank."""


class Training:
    """A training that goes on as long as it is asked to, with what a script does beside its steps."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        ranks = accelerator.num_processes
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        data = TensorDataset(torch.randn(4 * BATCHES * ranks, 8), torch.randint(0, 2, (4 * BATCHES * ranks,)))
        prepared = accelerator.prepare(net, optimizer, schedule, DataLoader(data, batch_size=4, shuffle=True))
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self._batches = self._endless()

    def _endless(self) -> Iterator[list[Tensor]]:
        while True:
            yield from self.loader

    def step(self, done: int) -> None:
        """Called on: all ranks."""
        accelerator = self.accelerator
        inputs, labels = next(self._batches)
        with accelerator.accumulate(self.model):
            outputs = self.model(inputs)
            accelerator.backward(nn.functional.cross_entropy(outputs, labels))
            accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        if done % 10 == 0:
            accelerator.gather({"outputs": outputs.detach(), "labels": labels})
            accelerator.gather_for_metrics(labels)
            accelerator.reduce(outputs.detach().sum(), "mean")
        if done % 50 == 0:
            if accelerator.is_main_process:
                accelerator.set_trigger()
            assert accelerator.check_trigger()
            accelerator.wait_for_everyone()


def in_session(done: int) -> Usage:
    """This process, and the keys of the job's store where it hosts one."""
    store: Any = next(iter(current._slot.stores.values()), None)
    return slopes.take(done, getattr(store, "raw", store))  # torch's own, where ours is around it


def many_steps(count: int) -> list[Usage]:
    """Called on: all ranks."""
    return slopes.watch(Training(Accelerator(cpu=True)).step, count, look=in_session)


def many_saves(count: int) -> list[Usage]:
    """Called on: all ranks. A step and a save, of which some are written in the background."""
    folder = Path(tempfile.mkdtemp()) if current.require(cpu=True).topology.is_main else Path()
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    training = Training(accelerator)

    def save(done: int) -> None:
        training.step(done)
        accelerator.save_state(durable=False, blocking=done % 4 != 0)

    def look(done: int) -> Usage:
        accelerator.wait_for_checkpoint()
        accelerator.wait_for_everyone()
        return in_session(done)

    try:
        return slopes.watch(save, count, look=look)
    finally:
        accelerator.wait_for_checkpoint()
        if accelerator.is_main_process:
            kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
            shutil.rmtree(folder)
            assert kept == [f"checkpoint_{number}" for number in (count - 2, count - 1)], kept


def many_cycles(count: int) -> list[Usage]:
    """Called on: all ranks. Prepare, train a little, and let go of it."""
    accelerator = Accelerator(cpu=True)
    accelerator.agree(lambda: None)  # from now on each backward can be left, by a hook of ours

    def cycle(done: int) -> None:
        training = Training(accelerator)
        for step in range(1, 3):
            training.step(step)
        accelerator.free_memory()

    return slopes.watch(cycle, count, look=in_session)


def many_sessions(count: int) -> list[Usage]:
    """Called on: all ranks. Two accelerators that are made, used and left."""

    def session(done: int) -> None:
        for _ in range(2):
            accelerator = Accelerator(cpu=True)
            Training(accelerator).step(50)
        accelerator.end_training()

    return slopes.watch(session, count, look=in_session)


def raw_sessions(count: int) -> list[Usage]:
    """Called on: all ranks. Process groups of raw torch, which keeps some kilobytes of each."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)

    def session(done: int) -> None:
        dist.init_process_group("gloo", store=dist.PrefixStore(str(done), store), rank=rank, world_size=2)
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
        model(torch.ones(4, 8)).sum().backward()
        del model
        gc.collect()
        dist.destroy_process_group()

    return slopes.watch(session, count)


def check(found: list[list[Usage]], what: str, began: float, note: Note, torchs: float = 0.0) -> None:
    for rank, samples in enumerate(found):
        note(f"{what}, rank {rank} of {len(found)}: {slopes.describe(samples, time.monotonic() - began)}")
    assert [line for samples in found for line in slopes.growth(samples, torchs)] == []


Work = Callable[[int], list[Usage]]


@pytest.mark.parametrize(("work", "world_size", "count"), [(many_cycles, 2, 40), (many_sessions, 1, 60)])
def test_python_objects_do_not_pile_up(work: Work, world_size: int, count: int, note: Note) -> None:
    began = time.monotonic()
    found = run_ranks(work, world_size, count, env=ALONE if world_size == 1 else {}, timeout=120.0)
    check(found, work.__name__.replace("_", " "), began, note)


@pytest.mark.soak_long
@pytest.mark.parametrize(
    ("work", "world_size", "count"),
    [
        (many_steps, 1, 200_000),
        (many_steps, 2, 200_000),
        (many_saves, 1, 10_000),
        (many_saves, 2, 10_000),
        (many_cycles, 1, 2_000),
        (many_cycles, 2, 2_000),
        (many_sessions, 1, 3_000),
        (many_sessions, 2, 300),
    ],
)
def test_nothing_piles_up(work: Work, world_size: int, count: int, note: Note) -> None:
    began = time.monotonic()
    env: dict[str, Any] = ALONE if world_size == 1 else {}
    # In processes of its own: what other tests have left in a pool's would be freed on the way.
    with Ranks(world_size, timeout=3600.0, env=env) as ranks:
        found = ranks.run(work, count)
        raw = ranks.run(raw_sessions, count) if work is many_sessions and world_size > 1 else []
    torchs = max((slopes.slope(samples, "memory") for samples in raw), default=0.0)
    check(found, work.__name__.replace("_", " "), began, note, torchs)
