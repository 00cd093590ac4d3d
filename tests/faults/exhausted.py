"""What the ranks of the out-of-memory tests run: a training in which one rank runs out of memory at a chosen place."""

from __future__ import annotations

import gc
import resource
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, DistributedDataParallelKwargs, find_executable_batch_size, set_seed

WIDTH = 16
START = 8
SAMPLES = 64
PHASES = ("build", "prepare", "loader", "forward", "backward", "step")


class Faked(RuntimeError):
    """As torch raises it where memory is that of a device."""


@dataclass
class Plan:
    """Who runs out where: on ``rank``, in ``phase`` of micro-batch ``at``, at every batch size above ``fits``."""

    rank: int
    phase: str
    at: int = 0
    fits: int = 4
    part: int | None = None
    """Only in this part of a batch that is computed in several; None for any."""
    error: str = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free."


@dataclass
class Seen:
    """What one rank saw."""

    sizes: list[int] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    steps: int = 0
    alive: list[int] = field(default_factory=list)
    """Models and optimizers of earlier attempts that were not freed when the next one began."""
    same_accelerator: bool = False
    error: str = ""


class Net(nn.Module):
    """Layers in several buckets, so that some gradients are on their way when the backward fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fault: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if place == 1 and self.fault is not None:
                self.fault("forward")
                x.register_hook(lambda _: self.fault("backward"))
        return x


class Data(TensorDataset):
    """Samples that can be read until memory runs out."""

    fault: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.fault is not None:
            self.fault("loader")
        return super().__getitem__(index)


def train(
    accelerator: Accelerator, plan: Plan | None, size: int, seen: Seen, kept: list[Any], samples: int = SAMPLES
) -> None:
    """One attempt: the whole training, from building to the last update."""
    gc.collect()
    seen.alive.append(sum(reference() is not None for reference in kept))
    seen.sizes.append(size)
    accelerator.free_memory()
    set_seed(3)
    now = {"at": 0}

    def fault(phase: str) -> None:
        here = (accelerator.process_index, phase, now["at"])
        if plan is not None and here == (plan.rank, plan.phase, plan.at) and size > plan.fits:
            raise Faked(plan.error)

    fault("build")
    net = Net()
    data = Data(torch.randn(samples, WIDTH), torch.randn(samples, WIDTH))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    kept += [weakref.ref(net), weakref.ref(optimizer)]
    fault("prepare")
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=size, shuffle=True))
    net.fault, data.fault = fault, fault
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            fault("step")
            optimizer.step()
            optimizer.zero_grad()
        now["at"] += 1
    seen.weights = [parameter.detach().clone() for parameter in net.parameters()]
    net.fault = data.fault = None


def search(
    plan: Plan | None,
    *,
    keep: bool = True,
    start: int = START,
    accumulation: int = 1,
    samples: int = SAMPLES,
    reproducible: bool = False,
    **options: Any,
) -> Seen:
    """Train through ``find_executable_batch_size`` with an accelerator that was made outside."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, reproducible=reproducible)
    before = id(accelerator)
    seen, kept = Seen(), []

    @find_executable_batch_size(starting_batch_size=start, keep_effective_batch=keep, **options)
    def inner(size: int) -> int:
        nonlocal accelerator
        train(accelerator, plan, size, seen, kept, samples)
        return size

    try:
        inner()
    except Exception as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.steps = accelerator.gradient_accumulation_steps
    seen.same_accelerator = id(accelerator) == before
    accelerator.gradient_accumulation_steps = accumulation
    return seen


# --- micro-batches -----------------------------------------------------------------------------------------------


@dataclass
class Parts:
    """What one rank saw of a training by ``auto_microbatch``."""

    weights: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    """Rows of each part that was computed, by step."""
    samples: list[int] = field(default_factory=list)
    """Which samples the updates were made from, by id."""
    limit: int | None = None


def train_in_parts(
    plan: Plan | None,
    *,
    accumulation: int = 1,
    samples: int = SAMPLES,
    reproducible: bool = False,
    plain: bool = False,
    limit: int | None = None,
) -> Parts:
    """Train with a batch of START on each rank; at micro-batch ``plan.at`` parts of more than ``plan.fits`` do not fit.

    ``plain`` trains without ``auto_microbatch``; ``limit`` has every batch begin in parts of so many samples.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, reproducible=reproducible)
    accelerator.free_memory()
    accelerator.gradient_accumulation_steps = accumulation
    accelerator.microbatch_size = limit
    set_seed(3)
    net = Net()
    data = TensorDataset(torch.randn(samples, WIDTH), torch.randn(samples, WIDTH), torch.arange(samples))
    loader = DataLoader(data, batch_size=START, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    seen, at = Parts(), 0

    def fault(phase: str, rows: int) -> None:
        if plan is None or (plan.rank, plan.phase, plan.at) != (accelerator.process_index, phase, at):
            return
        if rows > plan.fits and plan.part in (None, len(seen.sizes[-1]) - 1):
            raise Faked(plan.error)

    def compute_loss(part: dict[str, Any]) -> Tensor:
        seen.sizes[-1].append(len(part["x"]))
        net.fault = lambda phase: fault(phase, len(part["x"]))
        return (model(part["x"]) - part["rest"][0]).square().mean()

    for x, y, ids in loader:
        seen.sizes.append([])
        with accelerator.accumulate(model):
            batch = {"x": x, "rest": (y, ids), "name": "n", "texts": [str(number) for number in ids.tolist()]}
            if plain:
                loss = compute_loss(batch)
                accelerator.backward(loss)
            else:
                loss = accelerator.auto_microbatch(batch, compute_loss)
            seen.losses.append(float(loss))
            seen.samples += ids.tolist()
            optimizer.step()
            optimizer.zero_grad()
        at += 1
    seen.weights = [parameter.detach().clone() for parameter in net.parameters()]
    seen.limit = accelerator.microbatch_size
    return seen


# --- many of them, in one call -----------------------------------------------------------------------------------


def every_place(world_size: int) -> list[Plan]:
    """Each rank, in each phase, at each micro-batch."""
    once = [Plan(rank, phase) for rank in range(world_size) for phase in PHASES[:2]]
    steps = range(SAMPLES // (START * world_size))
    later = [Plan(rank, phase, at) for rank in range(world_size) for phase in PHASES[2:] for at in steps]
    # The loader is a batch ahead: in the last one there is nothing left to read.
    return once + [plan for plan in later if (plan.phase, plan.at) != ("loader", steps[-1])]


def every_part(world_size: int, steps: int) -> list[Plan]:
    """Each rank, in the forward and in the backward, at each micro-batch: at its first part, and at a later one."""
    ranks, phases = range(world_size), ("forward", "backward")
    whole = [Plan(rank, phase, at, 4) for rank in ranks for phase in phases for at in range(steps)]
    return whole + [Plan(rank, phase, at, 2, part=1) for rank in ranks for phase in phases for at in range(steps)]


def search_everywhere(plans: list[Plan], accumulation: int) -> list[Seen]:
    """A search for each plan, with one accelerator after the other in the same job."""
    return [search(plan, accumulation=accumulation) for plan in plans]


def split_everywhere(plans: list[Plan], accumulation: int, **options: Any) -> list[Parts]:
    """The same in micro-batches; a plan for a later part is one for a batch that begins in halves."""
    return [
        train_in_parts(plan, accumulation=accumulation, limit=None if plan.part is None else START // 2, **options)
        for plan in plans
    ]


def furthest(mine: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference between two sets of weights."""
    return max(float((one - other).abs().max()) for one, other in zip(mine, others, strict=True))


# --- really without memory ---------------------------------------------------------------------------------------


class Limited:
    """A region in which this process may have only so many bytes more than it has.

    Of data, not of addresses: of those glibc sets 64 MB aside for each thread that begins to allocate.
    """

    def __init__(self, more: int) -> None:
        self._more = more

    def __enter__(self) -> None:
        status = Path("/proc/self/status").read_text().splitlines()
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + self._more, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)


MEGABYTES = 1 << 18
"""Numbers of 4 bytes in one."""


def really(rank: int) -> tuple[list[int], int]:
    """A forward that takes 8 MB and more for each sample, on a rank that has 60 MB left."""
    accelerator = Accelerator(cpu=True)
    sizes = []

    @find_executable_batch_size(starting_batch_size=16)
    def inner(size: int) -> int:
        accelerator.free_memory()
        sizes.append(size)
        net = nn.Linear(WIDTH, WIDTH)
        model = accelerator.prepare(net)
        with Limited(60 << 20) if accelerator.process_index == rank else nullcontext():
            wide = model(torch.ones(size, WIDTH)).mean() * torch.ones(size, 8 * MEGABYTES)
            accelerator.backward(wide.mean())
        return size

    return sizes, inner()


def really_in_parts(rank: int) -> tuple[int | None, float]:
    """The same in micro-batches."""
    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    accelerator.gradient_accumulation_steps = 1
    accelerator.microbatch_size = None
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))

    def compute_loss(part: Tensor) -> Tensor:
        return (model(part) * torch.ones(len(part), 8 * MEGABYTES)).mean()

    with Limited(100 << 20) if accelerator.process_index == rank else nullcontext():
        accelerator.auto_microbatch(torch.arange(16.0).view(16, 1), compute_loss)
    return accelerator.microbatch_size, float(next(model.parameters()).grad)


def with_unused_parameters(rounds: int) -> list[int]:
    """Failures right after a backward in which DDP exchanges which parameters were used."""
    options = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    found = []
    for culprit in range(rounds):

        @find_executable_batch_size(starting_batch_size=4)
        def inner(size: int, culprit: int = culprit) -> int:
            accelerator.free_memory()
            net = nn.Sequential(*(nn.Linear(96, 96) for _ in range(5)))
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for step in range(3):
                loss = model(torch.ones(size, 96)).mean()
                if size > 2 and step == 1 and accelerator.process_index == culprit % accelerator.num_processes:
                    raise MemoryError
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            return size

        found.append(inner())
    return found
