"""What a training library adds to a hand-written PyTorch loop, in microseconds a step.

    python benchmarks/loop.py                   one process, and what importing costs
    python benchmarks/loop.py --processes 2     two processes over gloo, and what gathering costs

All contenders run in the same process, in turns: each repeat runs one short block of every contender, in an order
that rotates, and each block is compared with the raw block of the same repeat, so that what slows the machine for a
second slows both sides of a pair. ``raw (again)`` is the raw loop a second time: what it shows is the noise.

The raw loop is the strictest one that does the work. It has no ``.to(device)`` and no accumulation; its scheduler
steps once a step (Accelerate's and Lockstep's step once per process). For ``gather``, raw is the bare collective over
the same number of bytes, into memory that was allocated before. A block is one whole epoch, its beginning and end
included.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CONTENDERS = ("lockstep", "accelerate", "fabric")
IMPORTS = {
    "lockstep": "from lockstep import Accelerator",
    "accelerate": "from accelerate import Accelerator",
    "fabric": "from lightning_fabric import Fabric",
}
BATCH, FEATURES, HIDDEN, CLASSES = 16, 32, 64, 10
MIN_RATIOS = 30
"""Fewer pairs than this do not give a median that a bar may be held against."""


# --- the loops -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One contender, ready to train."""

    epoch: Callable[[], int]
    """Goes once through the loader; how many steps that took."""
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
    model, optimizer, scheduler = parts.model, parts.optimizer, parts.scheduler
    sampler: DistributedSampler[Any] | None = None
    if world_size > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(parts.dataset, shuffle=True)
    loader = DataLoader(parts.dataset, batch_size=BATCH, shuffle=sampler is None, sampler=sampler)
    number = 0

    def epoch() -> int:
        nonlocal number
        steps = 0
        number += 1
        if sampler is not None:
            sampler.set_epoch(number)
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
        return steps

    return Trainer(epoch=epoch, model=parts.model)


def make_accelerator(accelerator: Any, parts: Parts, world_size: int) -> Trainer:
    """The quick tour's loop, for the two libraries that have its interface."""
    check_world(type(accelerator).__module__, accelerator.num_processes, world_size)
    model, optimizer, loader, scheduler = accelerator.prepare(
        parts.model, parts.optimizer, DataLoader(parts.dataset, batch_size=BATCH, shuffle=True), parts.scheduler
    )

    def epoch() -> int:
        steps = 0
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps += 1
        return steps

    return Trainer(epoch=epoch, model=parts.model, gather=accelerator.gather)


def make_lockstep(parts: Parts, world_size: int) -> Trainer:
    from lockstep import Accelerator

    return make_accelerator(Accelerator(cpu=True), parts, world_size)


def make_accelerate(parts: Parts, world_size: int) -> Trainer:
    # Without it, every rank is silently "0 of 1" on a machine that has no GPU.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    from accelerate import Accelerator

    return make_accelerator(Accelerator(cpu=True), parts, world_size)


def make_fabric(parts: Parts, world_size: int) -> Trainer:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto")
    fabric.launch()
    check_world("lightning_fabric", fabric.world_size, world_size)
    model, optimizer = fabric.setup(parts.model, parts.optimizer)
    loader: Any = fabric.setup_dataloaders(DataLoader(parts.dataset, batch_size=BATCH, shuffle=True))
    scheduler = parts.scheduler

    def epoch() -> int:
        steps = 0
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
        return steps

    return Trainer(epoch=epoch, model=parts.model)


def check_world(library: str, seen: int, world_size: int) -> None:
    if seen != world_size:
        raise SystemExit(f"{library} sees a world of {seen}, not of {world_size}: its figures would mean nothing.")


def make_trainers(only: Sequence[str], steps: int, world_size: int) -> dict[str, Trainer]:
    """Called on: all ranks. Lockstep comes first, so that it makes the process group, as it does for its users."""
    makers = {"lockstep": make_lockstep, "accelerate": make_accelerate, "fabric": make_fabric}
    made = {name: makers[name](make_parts(steps, world_size), world_size) for name in CONTENDERS if name in only}
    raw = {name: make_raw(make_parts(steps, world_size), world_size) for name in ("raw", "raw (again)")}
    return {**raw, **made}


# --- measuring -----------------------------------------------------------------------------------------------------


def interleave(blocks: dict[str, Callable[[], object]], repeats: int, *, per_block: int) -> dict[str, list[float]]:
    """Called on: all ranks. Microseconds per unit of work: one figure for each block and repeat, slowest rank's."""
    together = dist.is_initialized()
    names = list(blocks)
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-2, repeats):  # the first two rounds are warm-up
        start = repeat % len(names)
        for name in names[start:] + names[:start]:
            gc.collect()
            if together:
                dist.barrier()
            begin = time.perf_counter()
            blocks[name]()
            spent = time.perf_counter() - begin
            if repeat >= 0:
                times[name].append(spent * 1e6 / per_block)
    if together:
        for name in names:
            slowest = torch.tensor(times[name], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[name] = slowest.tolist()
    return times


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How one contender compares with raw; times in microseconds."""

    name: str
    pairs: int
    best: float
    """Of all blocks."""
    median: float
    """Of all blocks."""
    ratio: float
    """Median of the paired ratios."""
    ratio_quartiles: tuple[float, float]
    ratio_of_best: float
    added: float
    """Median of the paired differences."""
    added_best: float
    """Difference of the two best blocks."""


def compare(name: str, mine: Sequence[float], raw: Sequence[float]) -> Figures:
    ratios = [a / b for a, b in zip(mine, raw, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return Figures(
        name=name,
        pairs=len(ratios),
        best=min(mine),
        median=median(mine),
        ratio=median(ratios),
        ratio_quartiles=(low, high),
        ratio_of_best=min(mine) / min(raw),
        added=median(a - b for a, b in zip(mine, raw, strict=True)),
        added_best=min(mine) - min(raw),
    )


def measure_steps(trainers: dict[str, Trainer], repeats: int, steps: int) -> list[Figures]:
    """Called on: all ranks. The training loop of each contender against raw's."""

    def block(trainer: Trainer) -> Callable[[], object]:
        def run() -> None:
            done = trainer.epoch()
            if done != steps:
                raise SystemExit(f"An epoch had {done} steps, not {steps}: the contenders do not do the same work.")

        return run

    before = weights(trainers["raw"])  # the same for all at the start
    times = interleave({name: block(trainer) for name, trainer in trainers.items()}, repeats, per_block=steps)
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
    rank, world_size = dist.get_rank(), dist.get_world_size()
    single = torch.randn(64, 10) + rank
    nested = {"logits": torch.randn(64, 10), "rest": (torch.arange(64) + rank, torch.rand(64, 4) > 0.5)}
    blocks: dict[str, Callable[[], object]] = {}

    def repeated(call: Callable[[Any], object], value: object) -> Callable[[], object]:
        def run() -> None:
            for _ in range(calls):
                call(value)

        return run

    for kind, value in (("one tensor", single), ("structure", nested)):
        leaves = [single] if kind == "one tensor" else [nested["logits"], *nested["rest"]]
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        packed = single if kind == "one tensor" else torch.zeros(size, dtype=torch.uint8)
        room = [torch.empty_like(packed) for _ in range(world_size)]

        def raw(tensor: Tensor, room: list[Tensor] = room) -> None:
            dist.all_gather(room, tensor)

        blocks[f"{kind}/raw"] = repeated(raw, packed)
        blocks[f"{kind}/raw (again)"] = repeated(raw, packed)
        for name, trainer in trainers.items():
            if trainer.gather is not None:
                check_gather(name, trainer.gather(value), leaves)
                blocks[f"{kind}/{name}"] = repeated(trainer.gather, value)
    times = interleave(blocks, repeats, per_block=calls)
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
    inside: float
    """Median of the import alone, timed inside the process."""


def measure_imports(only: Sequence[str], repeats: int) -> list[ImportCost]:
    statements = {name: f"import torch, time; t = time.perf_counter(); {IMPORTS[name]}" for name in only}
    statements = {name: f"{code}; print(time.perf_counter() - t)" for name, code in statements.items()}
    statements["raw"] = "import torch, time; t = time.perf_counter(); print(time.perf_counter() - t)"
    names = list(statements)
    whole: dict[str, list[float]] = {name: [] for name in names}
    inside: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-1, repeats):  # the first round fills the caches
        start = repeat % len(names)
        for name in names[start:] + names[:start]:
            begin = time.perf_counter()
            answer = subprocess.run(
                [sys.executable, "-c", statements[name]], check=True, capture_output=True, text=True
            )
            spent = time.perf_counter() - begin
            if repeat >= 0:
                whole[name].append(spent * 1e3)
                inside[name].append(float(answer.stdout.split()[-1]) * 1e3)
    return [
        ImportCost(
            name=name,
            pairs=repeats,
            added=median(a - b for a, b in zip(whole[name], whole["raw"], strict=True)),
            inside=median(inside[name]),
        )
        for name in only
    ]


# --- the bars ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A figure that Lockstep is held to."""

    what: str
    statistic: str
    value: float
    limit: float
    unit: str
    pairs: int
    needed: int = MIN_RATIOS

    @property
    def verdict(self) -> str:
        if self.pairs < self.needed:
            return f"no verdict: {self.pairs} pairs, {self.needed} needed"
        return "met" if self.value <= self.limit else "NOT MET"


def step_bars(figures: list[Figures], world_size: int) -> list[Bar]:
    mine = next((row for row in figures if row.name == "lockstep"), None)
    if mine is None:
        return []
    if world_size == 1:
        what = "added to a step, 1 process"
        return [
            Bar(
                what=what,
                statistic="median of paired differences",
                value=mine.added,
                limit=30,
                unit="us",
                pairs=mine.pairs,
            ),
            Bar(what=what, statistic="best minus best", value=mine.added_best, limit=30, unit="us", pairs=mine.pairs),
        ]
    what = f"step over raw DDP, {world_size} processes"
    return [
        Bar(what=what, statistic="median of paired ratios", value=mine.ratio, limit=1.03, unit="x", pairs=mine.pairs),
        Bar(what=what, statistic="best over best", value=mine.ratio_of_best, limit=1.03, unit="x", pairs=mine.pairs),
    ]


def gather_bars(gathers: dict[str, list[Figures]]) -> list[Bar]:
    limits = {"one tensor": 1.1, "structure": 1.2}
    return [
        Bar(
            what=f"gather, {kind}, over one raw all_gather",
            statistic="median of paired ratios",
            value=row.ratio,
            limit=limits[kind],
            unit="x",
            pairs=row.pairs,
        )
        for kind, rows in gathers.items()
        for row in rows
        if row.name == "lockstep"
    ]


def import_bars(costs: list[ImportCost]) -> list[Bar]:
    return [
        Bar(
            what="import lockstep after import torch",
            statistic=statistic,
            value=value,
            limit=60,
            unit="ms",
            pairs=cost.pairs,
            needed=9,
        )
        for cost in costs
        if cost.name == "lockstep"
        for statistic, value in (
            ("median of paired differences", cost.added),
            ("median, timed inside", cost.inside),
        )
    ]


# --- telling -------------------------------------------------------------------------------------------------------


def figures_table(title: str, unit: str, rows: list[Figures]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in (
        f"{unit}\nbest",
        f"{unit}\nmedian",
        "ratio to raw\nmedian of pairs",
        "quartiles of\nthe ratios",
        "ratio\nof bests",
        "added us\nmedian of pairs",
        "added us\nof bests",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        low, high = row.ratio_quartiles
        table.add_row(
            row.name,
            f"{row.best:.0f}",
            f"{row.median:.0f}",
            f"{row.ratio:.3f}",
            f"{low:.3f}–{high:.3f}",
            f"{row.ratio_of_best:.3f}",
            f"{row.added:+.1f}",
            f"{row.added_best:+.1f}",
        )
    return table


def imports_table(costs: list[ImportCost]) -> Table:
    table = Table(title=f"Import, on top of import torch ({costs[0].pairs} pairs of processes)", title_justify="left")
    table.add_column("")
    table.add_column("added ms\nmedian of pairs", justify="right")
    table.add_column("ms inside\nmedian", justify="right")
    for cost in costs:
        table.add_row(cost.name, f"{cost.added:+.0f}", f"{cost.inside:.0f}")
    return table


def bars_table(bars: list[Bar]) -> Table:
    table = Table(title="Bars for lockstep", title_justify="left")
    for heading in ("", "statistic", "measured", "at most", ""):
        table.add_column(heading, justify="right" if heading in ("measured", "at most") else "left")
    for bar in bars:
        digits = 3 if bar.unit == "x" else 1
        table.add_row(
            bar.what, bar.statistic, f"{bar.value:.{digits}f} {bar.unit}", f"{bar.limit:g} {bar.unit}", bar.verdict
        )
    return table


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("torch", "torch-lockstep", "accelerate", "lightning-fabric"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


# --- starting ------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a training step next to raw torch, Accelerate and Fabric.")
    parser.add_argument("--processes", type=int, help="default: 1, or the world this was started in")
    parser.add_argument("--repeats", type=int, default=60, help=f"pairs of blocks; bars need {MIN_RATIOS}")
    parser.add_argument("--steps", type=int, default=100, help="training steps a block")
    parser.add_argument("--calls", type=int, default=50, help="gathers a block (several processes only)")
    parser.add_argument("--imports", type=int, default=11, help="pairs of processes that import (one process only)")
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="contenders next to raw"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("--repeats: at least 2, for quartiles")
    return args


def start_ranks(processes: int) -> None:
    """Start this script again, under torch's launcher; does not come back."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    os.execv(sys.executable, [*launcher, *sys.argv])


def main() -> None:
    args = parse_arguments()
    world = os.environ.get("WORLD_SIZE")
    if world is None and (args.processes or 1) > 1:
        start_ranks(args.processes)
    world_size = int(world or 1)
    if args.processes not in (None, world_size):
        raise SystemExit(f"--processes {args.processes} was asked for in a world of {world_size}.")
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else Accelerate sets the number of threads by itself
    warnings.simplefilter("ignore")

    load_before = os.getloadavg()[0]
    imports = measure_imports(args.only, args.imports) if world_size == 1 and args.imports else []
    trainers = make_trainers(args.only, args.steps, world_size)
    torch.set_num_threads(1)
    steps = measure_steps(trainers, args.repeats, args.steps)
    gathers = measure_gather(trainers, args.repeats, args.calls) if world_size > 1 else {}
    bars = [*step_bars(steps, world_size), *gather_bars(gathers), *import_bars(imports)]

    if not dist.is_initialized() or dist.get_rank() == 0:
        told = [word for word in sys.argv[1:] if word != "--json"]
        if world_size > 1 and args.processes is None:
            told = ["--processes", str(world_size), *told]
        command = " ".join(["python", "benchmarks/loop.py", *told])
        if args.json:
            tell_json(world_size, load_before, steps, gathers, imports, bars, command)
        else:
            tell_tables(world_size, args, load_before, steps, gathers, imports, bars, command)
    if dist.is_initialized():
        dist.barrier()


def tell_json(
    world_size: int,
    load: float,
    steps: list[Figures],
    gathers: dict[str, list[Figures]],
    imports: list[ImportCost],
    bars: list[Bar],
    command: str,
) -> None:
    result = {
        "processes": world_size,
        "versions": versions(),
        "cores": os.cpu_count(),
        "load_before": load,
        "step_us": [asdict(row) for row in steps],
        "gather_us": {kind: [asdict(row) for row in rows] for kind, rows in gathers.items()},
        "import_ms": [asdict(cost) for cost in imports],
        "bars": [{**asdict(bar), "verdict": bar.verdict} for bar in bars],
        "command": command,
    }
    print(json.dumps(result, indent=2))


def tell_tables(
    world_size: int,
    args: argparse.Namespace,
    load: float,
    steps: list[Figures],
    gathers: dict[str, list[Figures]],
    imports: list[ImportCost],
    bars: list[Bar],
    command: str,
) -> None:
    console = Console(width=130, soft_wrap=True)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    console.print(f"{os.cpu_count()} cores, 1 thread a process, load before {load:.2f}")
    plural = "process" if world_size == 1 else "processes"
    title = f"Training step, {world_size} {plural} ({args.repeats} pairs of blocks of {args.steps} steps)"
    console.print(figures_table(title, "us/step", steps))
    for kind, rows in gathers.items():
        title = f"gather, {kind} ({args.repeats} pairs of blocks of {args.calls} calls)"
        console.print(figures_table(title, "us/call", rows))
    if imports:
        console.print(imports_table(imports))
    if bars:
        console.print(bars_table(bars))
    console.print("Made by:", command)


if __name__ == "__main__":
    main()
