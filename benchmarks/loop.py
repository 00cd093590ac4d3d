"""What a training library adds to a hand-written PyTorch loop, in microseconds a step.

    python benchmarks/loop.py                   one process, and what importing costs
    python benchmarks/loop.py --processes 2     two processes over gloo, and what gathering costs

All contenders run in the same process, in turns; ``measure.py`` says how they are compared. ``raw (again)`` is the raw
loop a second time: what it shows is the noise.

The raw loop is the strictest one that does the work. It has no ``.to(device)`` and no accumulation; its scheduler
steps once a step (Accelerate's and Lockstep's step once per process). For ``gather``, raw is the bare collective over
the same number of bytes, into memory that was allocated before. A block is one whole epoch, its beginning and end
included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import (
    ADDED,
    MIN_RATIOS,
    PAIRS,
    RATIO,
    TYPICAL,
    Bar,
    Conditions,
    Figures,
    Target,
    Work,
    bars_table,
    check_world,
    clock,
    compare,
    enter_world,
    figure_bars,
    figures_table,
    find_versions,
    interleave,
    new_accelerator,
    raw_all_gather,
    repeated,
    settle,
    spell_command,
    table,
    tell_conditions,
    verdict,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

AGAIN = "raw (again)"
CONTENDERS = ("lockstep", "accelerate", "fabric")
IMPORTS = {
    "lockstep": "from lockstep import Accelerator",
    "accelerate": "from accelerate import Accelerator",
    "fabric": "from lightning_fabric import Fabric",
}
BATCH, FEATURES, HIDDEN, CLASSES = 16, 32, 64, 10


# --- the loops -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One contender, ready to train."""

    epoch: Work
    """Goes once through the loader."""
    model: nn.Module
    """As the user made it, whatever it was wrapped in."""
    gather: Callable[[Any], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a user brings along: the same for all contenders."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    dataset: TensorDataset


def make_parts(steps: int, world_size: int) -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    size = steps * BATCH * world_size
    dataset = TensorDataset(torch.randn(size, FEATURES), torch.randint(0, CLASSES, (size,)))
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + 1e-6 * step))
    return Parts(model=model, optimizer=optimizer, scheduler=scheduler, dataset=dataset)


def make_raw(parts: Parts, world_size: int) -> Trainer:
    model: Any = parts.model
    optimizer, scheduler = parts.optimizer, parts.scheduler
    sampler: DistributedSampler[Any] | None = None
    if world_size > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(parts.dataset, shuffle=True)
    loader = DataLoader(parts.dataset, batch_size=BATCH, shuffle=sampler is None, sampler=sampler)
    number = 0

    def epoch(ticks: list[float]) -> None:
        nonlocal number
        number += 1
        if sampler is not None:
            sampler.set_epoch(number)
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ticks.append(clock())

    return Trainer(epoch=epoch, model=parts.model)


def make_accelerator(library: str, parts: Parts, world_size: int) -> Trainer:
    """The quick tour's loop, for the two libraries that have its interface."""
    accelerator = new_accelerator(library, world_size)
    model, optimizer, loader, scheduler = accelerator.prepare(
        parts.model, parts.optimizer, DataLoader(parts.dataset, batch_size=BATCH, shuffle=True), parts.scheduler
    )

    def epoch(ticks: list[float]) -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            ticks.append(clock())

    return Trainer(epoch=epoch, model=parts.model, gather=accelerator.gather)


def make_fabric(library: str, parts: Parts, world_size: int) -> Trainer:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto")
    fabric.launch()
    check_world(library, fabric.world_size, world_size)
    model, optimizer = fabric.setup(parts.model, parts.optimizer)
    loader: Any = fabric.setup_dataloaders(DataLoader(parts.dataset, batch_size=BATCH, shuffle=True))
    scheduler = parts.scheduler

    def epoch(ticks: list[float]) -> None:
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ticks.append(clock())

    return Trainer(epoch=epoch, model=parts.model)


def make_trainers(only: Sequence[str], steps: int, world_size: int) -> dict[str, Trainer]:
    """Called on: all ranks. Lockstep comes first, so that it makes the process group, as it does for its users."""
    makers = {"lockstep": make_accelerator, "accelerate": make_accelerator, "fabric": make_fabric}
    made = {name: makers[name](name, make_parts(steps, world_size), world_size) for name in CONTENDERS if name in only}
    raw = {name: make_raw(make_parts(steps, world_size), world_size) for name in ("raw", AGAIN)}
    return {**raw, **made}


# --- measuring -----------------------------------------------------------------------------------------------------


def measure_steps(trainers: dict[str, Trainer], repeats: int, steps: int) -> list[Figures]:
    """Called on: all ranks. The training loop of each contender against raw's."""
    before = weights(trainers["raw"])  # the same for all at the start
    times = interleave({name: trainer.epoch for name, trainer in trainers.items()}, repeats, steps)
    for name, trainer in trainers.items():
        check_training(name, before, weights(trainer))
    return [compare(name, times[name], times["raw"]) for name in trainers]


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def check_training(name: str, before: Tensor, after: Tensor) -> None:
    """Called on: all ranks. A contender that did not train, or whose ranks trained apart, has no time worth telling."""
    if torch.equal(before, after) or not bool(after.isfinite().all()):
        raise SystemExit(f"{name} did not train its model.")
    if dist.is_initialized():
        others = [torch.empty_like(after) for _ in range(dist.get_world_size())]
        dist.all_gather(others, after)
        if not all(torch.equal(after, other) for other in others):
            raise SystemExit(f"{name}: the ranks' weights differ.")


def measure_gather(trainers: dict[str, Trainer], repeats: int, calls: int) -> dict[str, list[Figures]]:
    """Called on: all ranks. ``gather`` of one tensor, and of a structure of three, against one raw all_gather."""
    rank = dist.get_rank()
    single = torch.randn(64, 10) + rank
    rest = (torch.arange(64) + rank, torch.rand(64, 4) > 0.5)
    nested = {"logits": single, "rest": rest}
    blocks: dict[str, Work] = {}

    for kind, value in (("one tensor", single), ("structure", nested)):
        leaves = [single] if kind == "one tensor" else [single, *rest]
        raw = raw_all_gather(leaves)
        blocks[f"{kind}/raw"] = repeated(raw, value, calls)
        blocks[f"{kind}/{AGAIN}"] = repeated(raw, value, calls)
        for name, trainer in trainers.items():
            if trainer.gather is not None:
                check_gather(name, trainer.gather(value), leaves)
                blocks[f"{kind}/{name}"] = repeated(trainer.gather, value, calls)
    times = interleave(blocks, repeats, calls)
    result: dict[str, list[Figures]] = {}
    for key, mine in times.items():
        kind, name = key.split("/")
        result.setdefault(kind, []).append(compare(name, mine, times[f"{kind}/raw"]))
    return result


def check_gather(name: str, answer: Any, leaves: Sequence[Tensor]) -> None:
    """Called on: all ranks. What came back is what raw torch gathers, in the shape it was given."""
    gathered = [answer] if isinstance(answer, Tensor) else [answer["logits"], *answer["rest"]]
    for got, leaf in zip(gathered, leaves, strict=True):
        room = [torch.empty_like(leaf) for _ in range(dist.get_world_size())]
        dist.all_gather(room, leaf)
        if not torch.equal(got, torch.cat(room)):
            raise SystemExit(f"{name}: gather gave a wrong result.")


@dataclass(frozen=True, kw_only=True)
class ImportCost:
    """What importing a library costs a process that has imported torch; milliseconds."""

    name: str
    pairs: int
    added: float
    """Median of the paired differences of two processes' whole lives, one with and one without the import."""
    cpu: float
    """The same for processor time, which other work on the machine hardly changes."""
    inside: float
    """Median of the import alone, timed inside the process."""
    inside_best: float


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_imports(only: Sequence[str], repeats: int) -> list[ImportCost]:
    statements = {name: f"import torch, time; t = time.perf_counter(); {IMPORTS[name]}" for name in only}
    statements = {name: f"{code}; print(time.perf_counter() - t)" for name, code in statements.items()}
    statements["raw"] = "import torch, time; t = time.perf_counter(); print(time.perf_counter() - t)"
    names = list(statements)
    whole: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    inside: dict[str, list[float]] = {name: [] for name in names}
    shuffle = random.Random(0).shuffle
    # Everybody is measured compiled, as an installed package is, also where this shell forbids to keep bytecode.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for repeat in range(-1, repeats):  # the first round fills the caches
        shuffle(names)
        for name in names:
            used = children_cpu()
            begin = clock()
            answer = subprocess.run(
                [sys.executable, "-c", statements[name]], check=True, capture_output=True, text=True, env=environment
            )
            spent = clock() - begin
            if repeat >= 0:
                whole[name].append(spent * 1e3)
                cpu[name].append((children_cpu() - used) * 1e3)
                inside[name].append(float(answer.stdout.split()[-1]) * 1e3)
    return [
        ImportCost(
            name=name,
            pairs=repeats,
            added=median(a - b for a, b in zip(whole[name], whole["raw"], strict=True)),
            cpu=median(a - b for a, b in zip(cpu[name], cpu["raw"], strict=True)),
            inside=median(inside[name]),
            inside_best=min(inside[name]),
        )
        for name in only
    ]


# --- the bars ------------------------------------------------------------------------------------------------------


GATHER = {"ratio": PAIRS, "ratio_typical": TYPICAL}
TARGETS = {
    "step/1": Target(what="added to a step, 1 process", unit="us", limit=40, statistics=ADDED),
    "step/2": Target(what="step over raw DDP", unit="x", limit=1.03, statistics=RATIO),
    "gather/one tensor": Target(what="gather, one tensor, over raw", unit="x", limit=1.1, statistics=GATHER),
    "gather/structure": Target(what="gather, structure, over raw", unit="x", limit=1.2, statistics=GATHER),
}
IMPORT_BAR = {
    "added": "wall time, median of pairs",
    "cpu": "processor time, median of pairs",
    "inside": "timed inside, median",
    "inside_best": "timed inside, best",
}


def bars(key: str, rows: list[Figures]) -> list[Bar]:
    return figure_bars(TARGETS[key], rows, AGAIN) if key in TARGETS else []


def import_bars(costs: list[ImportCost]) -> list[Bar]:
    return [
        Bar(
            what="import, after import torch",
            statistic=words,
            unit="ms",
            limit=60,
            value=getattr(cost, field),
            noise=None,
            verdict=verdict(getattr(cost, field), 60, cost.pairs, 9),
        )
        for cost in costs
        if cost.name == "lockstep"
        for field, words in IMPORT_BAR.items()
    ]


# --- telling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Report(Conditions):
    """All that was measured, and how."""

    steps_per_block: int
    calls_per_block: int
    step_us: list[Figures]
    gather_us: dict[str, list[Figures]]
    import_ms: list[ImportCost]
    bars: list[Bar]
    command: str


def tell(report: Report) -> None:
    """Markdown tables, to be kept in docs as they are."""
    console = tell_conditions(report, "raw")
    title = f"Training step, processes: {report.processes}, blocks of {report.steps_per_block} steps"
    console.print(figures_table(title, report.step_us))
    for kind, figures in report.gather_us.items():
        console.print(figures_table(f"gather, {kind}, blocks of {report.calls_per_block} calls", figures))
    if report.import_ms:
        title = f"Import, on top of import torch; {report.import_ms[0].pairs} pairs of processes"
        rows = [
            [cost.name, f"{cost.added:+.0f}", f"{cost.cpu:+.0f}", f"{cost.inside:.0f}", f"{cost.inside_best:.0f}"]
            for cost in report.import_ms
        ]
        console.print(
            table(
                title,
                ["ms", "added: median of pairs", "processor time, median of pairs", "timed inside, median", "best"],
                rows,
            )
        )
    if report.bars:
        console.print(bars_table(report.bars, "raw"))
    console.print(f"Made by: {report.command}")


# --- starting ------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a training step next to raw torch, Accelerate and Fabric.")
    parser.add_argument("--processes", type=int, help="default: 1, or the world this was started in")
    parser.add_argument("--repeats", type=int, default=100, help=f"pairs of blocks; bars need {MIN_RATIOS}")
    parser.add_argument("--steps", type=int, default=60, help="training steps a block")
    parser.add_argument("--calls", type=int, default=20, help="gathers a block (several processes only)")
    parser.add_argument("--imports", type=int, default=11, help="pairs of processes that import (one process only)")
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="contenders next to raw"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("--repeats: at least 2, for quartiles")
    return args


def main() -> None:
    args = parse_arguments()
    world_size = enter_world(args.processes)
    warnings.simplefilter("ignore")

    load_before = os.getloadavg()[0]
    imports = measure_imports(args.only, args.imports) if world_size == 1 and args.imports else []
    trainers = make_trainers(args.only, args.steps, world_size)
    settle()
    steps = measure_steps(trainers, args.repeats, args.steps)
    gathers = measure_gather(trainers, 3 * args.repeats, args.calls) if world_size > 1 else {}

    words = [word for word in sys.argv[1:] if word != "--json"]
    report = Report(
        processes=world_size,
        versions=find_versions("torch", "torch-lockstep", "accelerate", "lightning-fabric"),
        cores=os.cpu_count(),
        load_before=load_before,
        steps_per_block=args.steps,
        calls_per_block=args.calls,
        step_us=steps,
        gather_us=gathers,
        import_ms=imports,
        bars=[
            *bars(f"step/{world_size}", steps),
            *(bar for kind, rows in gathers.items() for bar in bars(f"gather/{kind}", rows)),
            *import_bars(imports),
        ],
        command=spell_command("loop.py", words, world_size, args.processes),
    )
    if world_size == 1 or dist.get_rank() == 0:
        if args.json:
            print(json.dumps(asdict(report), indent=2))
        else:
            tell(report)
    if world_size > 1:
        dist.barrier()


if __name__ == "__main__":
    main()
