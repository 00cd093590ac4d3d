"""What a training library adds to a hand-written PyTorch loop, in microseconds a step.

    python benchmarks/loop.py                   one process, and what importing costs
    python benchmarks/loop.py --processes 2     two processes over gloo, and what gathering costs

All contenders run in the same process, in turns: each repeat runs one short block of every contender, in an order
that keeps changing, and each block is compared with the raw block of the same repeat, so that what slows the machine
for a second slows both sides of a pair. ``raw (again)`` is the raw loop a second time: what it shows is the noise.

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
import random
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
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
MIN_RATIOS = 30
"""Fewer pairs than this do not give a median that a bar may be held against."""


# --- the loops -----------------------------------------------------------------------------------------------------


Work = Callable[[list[float]], object]
"""Does several equal pieces of work, and appends the time after each."""
clock = time.perf_counter


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


def make_accelerator(accelerator: Any, parts: Parts, world_size: int) -> Trainer:
    """The quick tour's loop, for the two libraries that have its interface."""
    check_world(type(accelerator).__module__, accelerator.num_processes, world_size)
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

    def epoch(ticks: list[float]) -> None:
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ticks.append(clock())

    return Trainer(epoch=epoch, model=parts.model)


def check_world(library: str, seen: int, world_size: int) -> None:
    if seen != world_size:
        raise SystemExit(f"{library} sees a world of {seen}, not of {world_size}: its figures would mean nothing.")


def make_trainers(only: Sequence[str], steps: int, world_size: int) -> dict[str, Trainer]:
    """Called on: all ranks. Lockstep comes first, so that it makes the process group, as it does for its users."""
    makers = {"lockstep": make_lockstep, "accelerate": make_accelerate, "fabric": make_fabric}
    made = {name: makers[name](make_parts(steps, world_size), world_size) for name in CONTENDERS if name in only}
    raw = {name: make_raw(make_parts(steps, world_size), world_size) for name in ("raw", AGAIN)}
    return {**raw, **made}


# --- measuring -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Times:
    """Microseconds for a piece of work, one figure a block; of several ranks the slowest counts."""

    whole: list[float]
    """A block's time over its pieces: with all that happens now and then, on this machine and in the library."""
    typical: list[float]
    """A block's median piece: what others do on the machine meanwhile hardly shows, nor does what is rare."""


def interleave(blocks: dict[str, Work], repeats: int, pieces: int) -> dict[str, Times]:
    """Called on: all ranks. Run one block of each in turn, again and again, in an order that keeps changing."""
    together = dist.is_initialized()
    names = list(blocks)
    # Shuffled, not rotated: in a rotation everyone always runs after the same neighbour, and on its warm caches.
    shuffle = random.Random(0).shuffle  # the same on all ranks
    times = {name: Times(whole=[], typical=[]) for name in names}
    for repeat in range(-2, repeats):  # the first two rounds are warm-up
        shuffle(names)
        for name in names:
            ticks: list[float] = []
            gc.collect()
            if together:
                dist.barrier()
            begin = clock()
            blocks[name](ticks)
            end = clock()
            if len(ticks) != pieces:
                raise SystemExit(f"{name} did {len(ticks)} pieces of work, not {pieces}: that is no fair comparison.")
            if repeat >= 0:
                times[name].whole.append((end - begin) * 1e6 / pieces)
                times[name].typical.append(median(b - a for a, b in pairwise([begin, *ticks])) * 1e6)
    if together:
        for mine in times.values():
            for figures in (mine.whole, mine.typical):
                slowest = torch.tensor(figures, dtype=torch.float64)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                figures[:] = slowest.tolist()
    return times


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How one contender compares with raw; times in microseconds. Whole blocks, but for the two typical ones."""

    name: str
    pairs: int
    best: float
    """The best block."""
    median: float
    """The median block."""
    ratio: float
    """Median of the paired ratios."""
    ratio_quartiles: tuple[float, float]
    ratio_of_best: float
    ratio_typical: float
    """Median of the paired ratios of the blocks' median pieces."""
    added: float
    """Median of the paired differences."""
    added_best: float
    """Difference of the two best blocks."""
    added_typical: float
    """Median of the paired differences of the blocks' median pieces."""


def compare(name: str, mine: Times, raw: Times) -> Figures:
    whole = list(zip(mine.whole, raw.whole, strict=True))
    typical = list(zip(mine.typical, raw.typical, strict=True))
    ratios = [a / b for a, b in whole]
    low, _, high = quantiles(ratios, n=4)
    return Figures(
        name=name,
        pairs=len(ratios),
        best=min(mine.whole),
        median=median(mine.whole),
        ratio=median(ratios),
        ratio_quartiles=(low, high),
        ratio_of_best=min(mine.whole) / min(raw.whole),
        ratio_typical=median(a / b for a, b in typical),
        added=median(a - b for a, b in whole),
        added_best=min(mine.whole) - min(raw.whole),
        added_typical=median(a - b for a, b in typical),
    )


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
    rank, world_size = dist.get_rank(), dist.get_world_size()
    single = torch.randn(64, 10) + rank
    rest = (torch.arange(64) + rank, torch.rand(64, 4) > 0.5)
    nested = {"logits": single, "rest": rest}
    blocks: dict[str, Work] = {}

    def repeated(call: Callable[[Any], object], value: object) -> Work:
        def run(ticks: list[float]) -> None:
            for _ in range(calls):
                call(value)
                ticks.append(clock())

        return run

    for kind, value in (("one tensor", single), ("structure", nested)):
        leaves = [single] if kind == "one tensor" else [single, *rest]
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        packed = single if kind == "one tensor" else torch.zeros(size, dtype=torch.uint8)
        room = [torch.empty_like(packed) for _ in range(world_size)]

        def raw(tensor: Tensor, room: list[Tensor] = room) -> None:
            dist.all_gather(room, tensor)

        blocks[f"{kind}/raw"] = repeated(raw, packed)
        blocks[f"{kind}/{AGAIN}"] = repeated(raw, packed)
        for name, trainer in trainers.items():
            if trainer.gather is not None:
                check_gather(name, trainer.gather(value), leaves)
                blocks[f"{kind}/{name}"] = repeated(trainer.gather, value)
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
    for repeat in range(-1, repeats):  # the first round fills the caches
        shuffle(names)
        for name in names:
            used = children_cpu()
            begin = clock()
            answer = subprocess.run(
                [sys.executable, "-c", statements[name]], check=True, capture_output=True, text=True
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


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A figure that Lockstep is held to."""

    what: str
    statistic: str
    unit: str
    limit: float
    value: float
    noise: float | None
    """The same statistic for the raw loop against itself."""
    verdict: str


PAIRS, BESTS, TYPICAL = "whole blocks, median of pairs", "best blocks", "typical pieces, median of pairs"
FIGURE_BARS = {
    "step/1": ("added to a step, 1 process", "us", 30, {"added": PAIRS, "added_best": BESTS, "added_typical": TYPICAL}),
    "step/2": ("step over raw DDP", "x", 1.03, {"ratio": PAIRS, "ratio_of_best": BESTS, "ratio_typical": TYPICAL}),
    "gather/one tensor": ("gather, one tensor, over raw", "x", 1.1, {"ratio": PAIRS, "ratio_typical": TYPICAL}),
    "gather/structure": ("gather, structure, over raw", "x", 1.2, {"ratio": PAIRS, "ratio_typical": TYPICAL}),
}
IMPORT_BAR = {
    "added": "wall time, median of pairs",
    "cpu": "processor time, median of pairs",
    "inside": "timed inside, median",
    "inside_best": "timed inside, best",
}


def verdict(value: float, limit: float, pairs: int, needed: int) -> str:
    if pairs < needed:
        return f"no verdict: {pairs} pairs, {needed} needed"
    return "met" if value <= limit else "NOT MET"


def figure_bars(key: str, rows: list[Figures]) -> list[Bar]:
    named = {row.name: row for row in rows}
    mine = named.get("lockstep")
    if mine is None or key not in FIGURE_BARS:
        return []
    what, unit, limit, statistics = FIGURE_BARS[key]
    return [
        Bar(
            what=what,
            statistic=words,
            unit=unit,
            limit=limit,
            value=getattr(mine, field),
            noise=getattr(named[AGAIN], field),
            verdict=verdict(getattr(mine, field), limit, mine.pairs, MIN_RATIOS),
        )
        for field, words in statistics.items()
    ]


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
class Report:
    """All that was measured, and how."""

    processes: int
    versions: dict[str, str]
    cores: int | None
    load_before: float
    """Of the machine, before this started: figures from a busy machine are worth less."""
    steps_per_block: int
    calls_per_block: int
    step_us: list[Figures]
    gather_us: dict[str, list[Figures]]
    import_ms: list[ImportCost]
    bars: list[Bar]
    command: str


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    result = Table(title=title, title_justify="left", box=MARKDOWN)
    for number, heading in enumerate(headings):
        figures = number > 0 and rows[0][number][-1:].isdigit()
        result.add_column(heading, justify="right" if figures else "left", no_wrap=True)
    for row in rows:
        result.add_row(*row)
    return result


def figures_table(title: str, rows: list[Figures]) -> Table:
    headings = [
        "us",
        "best",
        "median",
        "ratio: pairs",
        "quartiles",
        "bests",
        "typical",
        "added: pairs",
        "bests",
        "typical",
    ]
    return table(
        f"{title}; {rows[0].pairs} pairs",
        headings,
        [
            [
                row.name,
                f"{row.best:.0f}",
                f"{row.median:.0f}",
                f"{row.ratio:.3f}",
                f"{row.ratio_quartiles[0]:.2f}–{row.ratio_quartiles[1]:.2f}",
                f"{row.ratio_of_best:.3f}",
                f"{row.ratio_typical:.3f}",
                f"{row.added:+.1f}",
                f"{row.added_best:+.1f}",
                f"{row.added_typical:+.1f}",
            ]
            for row in rows
        ],
    )


LEGEND = """\
best, median: of whole blocks, per piece of work. ratio (to raw) and added (to raw, us): "pairs" = median over the
pairs of whole blocks, "bests" = of the two best blocks, "typical" = median over the pairs of the blocks' median pieces.
"""


def tell(report: Report) -> None:
    """Markdown tables, to be kept in docs as they are."""
    console = Console(width=160, highlight=False)
    console.print(", ".join(f"{name} {version}" for name, version in report.versions.items()))
    console.print(f"{report.cores} cores, 1 thread a process, load before: {report.load_before:.2f}\n")
    console.print(LEGEND)
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
        rows = []
        for bar in report.bars:
            digits = 3 if bar.unit == "x" else 1
            noise = "-" if bar.noise is None else f"{bar.noise:.{digits}f}"
            measured = f"{bar.value:.{digits}f}"
            rows.append([bar.what, bar.statistic, bar.unit, measured, f"{bar.limit:g}", bar.verdict, noise])
        headings = ["bar", "statistic", "unit", "lockstep", "at most", "verdict", "raw against itself"]
        console.print(table("Bars", headings, rows))
    console.print(f"Made by: {report.command}")


def find_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "torch-lockstep", "accelerate", "lightning-fabric"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "(not installed)"
    return found


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
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else Accelerate sets the number of threads by itself
    warnings.simplefilter("ignore")

    load_before = os.getloadavg()[0]
    imports = measure_imports(args.only, args.imports) if world_size == 1 and args.imports else []
    trainers = make_trainers(args.only, args.steps, world_size)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was loaded so far is left out of the collections between blocks, which then take no time
    steps = measure_steps(trainers, args.repeats, args.steps)
    gathers = measure_gather(trainers, 3 * args.repeats, args.calls) if world_size > 1 else {}

    words = [word for word in sys.argv[1:] if word != "--json"]
    if world_size > 1 and args.processes is None:
        words = ["--processes", str(world_size), *words]
    report = Report(
        processes=world_size,
        versions=find_versions(),
        cores=os.cpu_count(),
        load_before=load_before,
        steps_per_block=args.steps,
        calls_per_block=args.calls,
        step_us=steps,
        gather_us=gathers,
        import_ms=imports,
        bars=[
            *figure_bars(f"step/{world_size}", steps),
            *(bar for kind, rows in gathers.items() for bar in figure_bars(f"gather/{kind}", rows)),
            *import_bars(imports),
        ],
        command=" ".join(["python", "benchmarks/loop.py", *words]),
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
