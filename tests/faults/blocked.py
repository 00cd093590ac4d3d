"""What the ranks of the fault tests run: one of them raises while the others are blocked in some collective.

Every round picks another rank to fail, and after each one the same prepared model trains on, with the Accelerator
that was made before the first failure. What each rank saw comes back as `Round`s, to be judged by the test.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import Accelerator, current
from lockstep.comm.agree import agree
from lockstep.comm.objects import gather_object
from lockstep.config.handlers import DistributedDataParallelKwargs
from lockstep.process_group.group import Group

WIDTH = 96


@dataclass
class Round:
    """What one rank saw of one failure."""

    culprit: int
    failures: list[tuple[int, str, str]]
    """(rank, kind, message) of each failure that the agreement names."""
    own_error: str | None
    """This rank's own error."""
    seconds: float
    """From the failing rank's `raise` to this rank's return from the agreement."""
    generations: int
    """New process groups that it took."""
    weights: str
    """A digest of the weights after training on."""
    gradient_error: float
    """How far DDP's gradient was from the mean of the ranks' own."""


@dataclass
class Report:
    """What one rank saw of all rounds."""

    rounds: list[Round] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    """Threads of the process, native ones included, after each round."""
    fds: list[int] = field(default_factory=list)
    """Open descriptors after each round."""
    same_accelerator: bool = False
    python_threads: list[str] = field(default_factory=list)


class Net(nn.Module):
    """A few layers, so that DDP has several buckets on their way when one fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.fault: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if place == 2 and self.fault is not None and x.requires_grad:
                x.register_hook(self.fault)
        return x.square().mean()


class Job:
    """One rank's side of the training that the failures interrupt."""

    def __init__(self, seed: int = 0) -> None:
        options = DistributedDataParallelKwargs(bucket_cap_mb=0.05)  # type: ignore[arg-type]
        self.accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
        self.group: Group = current.require().group
        self.rank, self.world_size = self.group.rank, self.group.world_size
        self.random = random.Random(seed)  # the same on all ranks
        self.data = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.rebuild()

    def rebuild(self) -> None:
        """A model that DDP has not seen a backward of."""
        self.accelerator.free_memory()
        torch.manual_seed(self.rank)  # prepare gives everyone rank 0's weights
        net = Net()
        self.model, self.optimizer = self.accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05))
        self.buffered = self.accelerator.prepare(nn.BatchNorm1d(WIDTH))

    @property
    def net(self) -> Net:
        return self.accelerator.unwrap_model(self.model)  # type: ignore[return-value]

    def loss(self) -> Tensor:
        return self.model(torch.randn(4, WIDTH, generator=self.data))

    def train(self, steps: int = 3) -> float:
        """Train on; how far the averaged gradient is from the mean of the ranks' own gradients."""
        worst = 0.0
        for _ in range(steps):
            batch = torch.randn(4, WIDTH, generator=self.data)
            alone = copy.deepcopy(self.net)
            alone(batch).backward()
            mean = self.accelerator.reduce([parameter.grad for parameter in alone.parameters()], "mean")
            self.optimizer.zero_grad()
            self.accelerator.backward(self.model(batch))
            for parameter, expected in zip(self.net.parameters(), mean, strict=True):
                worst = max(worst, float((parameter.grad - expected).abs().max()))
            self.optimizer.step()
        return worst

    def weights(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.net.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


# --- what the others are blocked in ------------------------------------------------------------------------------


def in_gather(job: Job) -> None:
    tree = {"a": torch.ones(3, 2), "b": torch.ones(2, dtype=torch.bool)}
    job.accelerator.gather(tree)


def in_barrier(job: Job) -> None:
    job.accelerator.wait_for_everyone()


def in_backward(job: Job) -> None:
    job.accelerator.backward(job.loss())


def in_buffers(job: Job) -> None:
    """The forward gives everyone rank 0's running mean; the other ranks wait in the backward when it is there."""
    job.accelerator.backward(job.buffered(torch.randn(4, WIDTH, generator=job.data)).square().mean())


def in_all_reduce(job: Job) -> None:
    dist.all_reduce(torch.ones(300_000))


def in_gather_object(job: Job) -> None:
    gather_object(job.group, [job.rank, "x" * 20_000])


BLOCKED: dict[str, Callable[[Job], None]] = {
    "gather": in_gather,
    "barrier": in_barrier,
    "backward": in_backward,
    "middle of backward": in_backward,
    "first backward": in_backward,
    "middle of first backward": in_backward,
    "bucket rebuild": in_backward,
    "buffers": in_buffers,
    "all_reduce": in_all_reduce,
    "gather_object": in_gather_object,
}


def one_round(job: Job, scenario: str, number: int) -> Round:
    culprit = number % job.world_size
    delay = job.random.choice([0.0, 0.01, 0.05, 0.25])
    if "first" in scenario or "rebuild" in scenario:
        job.rebuild()
    if "rebuild" in scenario:
        job.train(1)

    def fail(_: object = None) -> None:
        raise ValueError(f"round {number} at {time.monotonic()}")

    def step() -> None:
        if job.rank != culprit:
            BLOCKED[scenario](job)
        elif "middle" in scenario:
            job.net.fault = fail
            job.accelerator.backward(job.loss())
        else:
            time.sleep(delay)
            fail()

    before = job.group.generation
    agreement = agree(job.group, step)
    now = time.monotonic()
    job.net.fault = None
    raised = [float(failure.message.rpartition(" ")[2]) for failure in agreement.failures]
    return Round(
        culprit=culprit,
        failures=[(f.rank, f.kind, f.message.rpartition(" at ")[0]) for f in agreement.failures],
        own_error=None if agreement.error is None else type(agreement.error).__name__,
        seconds=now - min(raised, default=now),
        generations=job.group.generation - before,
        gradient_error=job.train(),
        weights=job.weights(),
    )


def rounds(scenario: str, count: int, seed: int = 0) -> Report:
    """Called on: all ranks. ``count`` failures of one kind, one after the other, each followed by training."""
    job = Job(seed)
    before = job.accelerator
    job.train()
    report = Report()
    for number in range(count):
        report.rounds.append(one_round(job, scenario, number))
        report.threads.append(len(os.listdir("/proc/self/task")))
        report.fds.append(len(os.listdir("/proc/self/fd")))
    report.same_accelerator = job.accelerator is before and current.require().training is before._state
    report.python_threads = sorted(thread.name for thread in threading.enumerate())
    return report


def problems(reports: list[Report], count: int) -> list[str]:
    """What is wrong with what the ranks saw; empty when every round went as it should."""
    found = []
    for number in range(count):
        seen = [report.rounds[number] for report in reports]
        culprit = number % len(reports)
        expected = [(culprit, "ValueError", f"round {number}")]
        for rank, round_ in enumerate(seen):
            where = f"round {number}, rank {rank}"
            if round_.failures != expected:
                found.append(f"{where}: named {round_.failures}, not {expected}")
            if round_.own_error != ("ValueError" if rank == culprit else None):
                found.append(f"{where}: own error {round_.own_error}")
            if round_.seconds >= 3.0:
                found.append(f"{where}: took {round_.seconds:.2f} s")
            if round_.generations != 1:
                found.append(f"{where}: {round_.generations} generations")
            if not round_.gradient_error < 1e-6:
                found.append(f"{where}: gradient off by {round_.gradient_error}")
        if len({round_.weights for round_ in seen}) != 1:
            found.append(f"round {number}: weights differ")
    found += [f"rank {rank}: another accelerator" for rank, r in enumerate(reports) if not r.same_accelerator]
    return found


def settle() -> tuple[int, int]:
    """Threads and descriptors of this process after a collection."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
