"""What a prepared loader adds to a plain one, and what it costs to resume an epoch and to gather metrics.

    python benchmarks/data.py                   one process: skipping to 90 % of a shuffled epoch of 10 million samples
    python benchmarks/data.py --processes 2     two processes over gloo: reading whole epochs, gather_for_metrics

All contenders run in the same process, in turns; ``measure.py`` says how they are compared. A row "(again)" is the
baseline a second time: what it shows is the noise.

Reading. A block is one whole epoch, its beginning and end included, and nothing is done with the batches. Plain is
torch's loader with a DistributedSampler, over the same tensors; every contender's epoch ``e`` is shuffled from the same
seed. For the iterable data set, plain is a loader over an iterable that goes straight to its rank's samples; the
libraries read the whole stream on every rank (Accelerate is asked to: it would dispatch), so its samples lie ready in a
list and cost next to nothing to read. For dispatched batches, plain is rank 0 reading for all, and one
``dist.scatter`` a batch. Before it is timed, each contender has to show that all ranks together read each sample once.

Skipping. A block is the time from the call of ``skip_first_batches`` to the first batch, each time with a loader that
was not used before; the baseline is one ``torch.randperm`` of as many samples. Before it is timed, each contender has
to show that after skipping the same batches follow as in the whole epoch.

Metrics. ``gather_for_metrics`` of predictions and labels while a loader is open, next to one bare ``all_gather`` of as
many bytes into memory that was allocated before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import (
    ADDED,
    BESTS,
    MIN_RATIOS,
    PAIRS,
    WARM_UPS,
    Bar,
    Conditions,
    Figures,
    Target,
    Work,
    bars_table,
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
    tell_conditions,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

LIBRARIES = ("lockstep", "accelerate")
"""Lockstep comes first, so that it makes the process group, as it does for its users."""
PARTS = ("shuffled", "in order", "iterable", "dispatched", "metrics", "skipping")
PLAIN = "plain"
BATCH, FEATURES, CLASSES, SEED = 32, 16, 10, 1234
SKIPPING = {"ratio": PAIRS, "ratio_of_best": BESTS}
"""A block is one piece of work: there is no typical one."""
TARGETS = {
    "shuffled": Target(what="added to a batch, shuffled", unit="us", limit=10, statistics=ADDED),
    "in order": Target(what="added to a batch, in order", unit="us", limit=10, statistics=ADDED),
    "skipping": Target(what="skipping over one randperm", unit="x", limit=1.0, statistics=SKIPPING),
}


@dataclass(frozen=True, kw_only=True)
class Section:
    """One comparison."""

    part: str
    title: str
    unit: str
    """For the eye: the figures themselves are microseconds."""
    figures: list[Figures]
    missing: dict[str, str] = field(default_factory=dict)
    """Contenders that could not be measured, and why."""


def again(baseline: str) -> str:
    return f"{baseline} (again)"


def section(part: str, title: str, blocks: dict[str, Work], repeats: int, pieces: int, **more: Any) -> Section:
    """Called on: all ranks. Run the blocks in turns; the first is the baseline."""
    times = interleave(blocks, repeats, pieces)
    baseline = times[next(iter(blocks))]
    figures = [compare(name, times[name], baseline) for name in blocks]
    return Section(part=part, title=title, figures=figures, **{"unit": "us", **more})


# --- reading -------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Tensor]):
    """Samples that lie ready, one after the other; with a rank, only those of every so many-th batch."""

    def __init__(self, samples: Sequence[Tensor], rank: int = 0, world_size: int = 1) -> None:
        batches = [samples[start : start + BATCH] for start in range(0, len(samples), BATCH)]
        self.samples = [sample for batch in batches[rank::world_size] for sample in batch]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.samples)


class Scattered:
    """Rank 0 reads batches for all ranks and sends each its part."""

    def __init__(self, samples: Sequence[Tensor], batches: int) -> None:
        self.loader = DataLoader(Stream(samples), batch_size=BATCH * dist.get_world_size())
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        reads, world_size = dist.get_rank() == 0, dist.get_world_size()
        batches: Iterable[Any] = self.loader if reads else repeat(None, self.batches)
        for batch in batches:
            mine = torch.empty(BATCH, FEATURES)
            dist.scatter(mine, list(batch.chunk(world_size)) if reads else None)
            yield mine


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One contender, ready to read epochs."""

    loader: Iterable[Any]
    seed: Callable[[int], object] = lambda epoch: None
    """Says which epoch comes next."""

    def epochs(self) -> Work:
        """A block that reads the next epoch, from the second on: the first is for the check."""
        numbers = count(1)

        def run(ticks: list[float]) -> None:
            self.seed(next(numbers))
            for _ in self.loader:
                ticks.append(clock())

        return run


@dataclass(frozen=True, kw_only=True)
class Readings:
    """The contenders of one part."""

    readers: dict[str, Reader]
    missing: dict[str, str]


def make_plain(part: str, data: Tensor, batches: int) -> Reader:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if part == "dispatched":
        return Reader(loader=Scattered(data.unbind(), batches))
    if part == "iterable":
        return Reader(loader=DataLoader(Stream(data.unbind(), rank, world_size), batch_size=BATCH))
    dataset = TensorDataset(data)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=part == "shuffled", seed=SEED)
    return Reader(loader=DataLoader(dataset, batch_size=BATCH, sampler=sampler), seed=sampler.set_epoch)


def make_prepared(library: str, part: str, data: Tensor, world_size: int) -> Reader:
    """Called on: all ranks. The same data behind a library's loader; raises where the library cannot do it."""
    if part in ("iterable", "dispatched"):
        accelerator = new_accelerator(library, world_size, dispatch_batches=part == "dispatched")
        return Reader(loader=accelerator.prepare(DataLoader(Stream(data.unbind()), batch_size=BATCH)))
    accelerator = new_accelerator(library, world_size)
    if part == "in order":
        return Reader(loader=accelerator.prepare(DataLoader(TensorDataset(data), batch_size=BATCH)))
    generator = torch.Generator()
    loader = DataLoader(TensorDataset(data), batch_size=BATCH, shuffle=True, generator=generator)
    return Reader(loader=accelerator.prepare(loader), seed=lambda epoch: generator.manual_seed(SEED + epoch))


def make_readings(part: str, libraries: Sequence[str], batches: int, world_size: int) -> Readings:
    """Called on: all ranks. All contenders of a part; each has been seen to read each sample once."""
    size = batches * BATCH * world_size
    data = torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(SEED))
    data[:, 0] = torch.arange(size)  # by this a sample is known again
    prepared: dict[str, Reader] = {}
    missing: dict[str, str] = {}
    for library in libraries:
        try:
            prepared[library] = make_prepared(library, part, data, world_size)
        except NotImplementedError as error:  # Lockstep's NotYetError is one
            missing[library] = f"{type(error).__name__}: {error}"
    if not dist.is_initialized():  # the only contender has refused
        dist.init_process_group("gloo")
    plain = {name: make_plain(part, data, batches) for name in (PLAIN, again(PLAIN))}
    readers = {**plain, **prepared}
    for name, reader in readers.items():
        check_epoch(name, reader, size, shuffled=part == "shuffled")
    return Readings(readers=readers, missing=missing)


def check_epoch(name: str, reader: Reader, size: int, shuffled: bool) -> None:
    """Called on: all ranks. A contender that leaves samples out, or reads them twice, has no time worth telling."""
    reader.seed(0)
    batches = [batch if isinstance(batch, Tensor) else batch[0] for batch in reader.loader]
    mine = torch.cat([batch[:, 0] for batch in batches]).long()
    if any(len(batch) != BATCH for batch in batches) or len(mine) * dist.get_world_size() != size:
        raise SystemExit(f"{name}: rank {dist.get_rank()} read {len(mine)} of {size} samples, or broken batches.")
    if shuffled is bool((mine.diff() > 0).all()):
        raise SystemExit(f"{name}: the order should {'' if shuffled else 'not '}be shuffled.")
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    if not torch.equal(torch.cat(everyones).sort().values, torch.arange(size)):
        raise SystemExit(f"{name}: the ranks together did not read each sample once.")


def measure_reading(part: str, readings: Readings, repeats: int, batches: int) -> Section:
    """Called on: all ranks."""
    words = {"iterable": "iterable data set", "dispatched": "iterable data set, dispatch_batches=True"}
    title = f"Reading a batch, {words.get(part, part)}, processes: {dist.get_world_size()}, blocks of {batches} batches"
    blocks = {name: reader.epochs() for name, reader in readings.readers.items()}
    return section(part, title, blocks, repeats, batches, missing=readings.missing)


# --- metrics -------------------------------------------------------------------------------------------------------


def measure_metrics(libraries: Sequence[str], repeats: int, calls: int, world_size: int) -> list[Section]:
    """Called on: all ranks. In the middle of an epoch, and at its last batch, whose repeated samples are cut off."""
    accelerators = {library: new_accelerator(library, world_size) for library in libraries}
    rank = dist.get_rank()
    value = (torch.randn(BATCH, CLASSES) + rank, torch.arange(BATCH) + rank)
    unfilled, rounds = 10, 3
    dataset = TensorDataset(torch.arange(rounds * BATCH * world_size - unfilled))
    loaders = {
        name: accelerator.prepare(DataLoader(dataset, batch_size=BATCH)) for name, accelerator in accelerators.items()
    }
    sections = []
    for place, batches, rows in (
        ("in an epoch", 1, BATCH * world_size),
        ("at its last batch", rounds, BATCH * world_size - unfilled),
    ):
        raw = raw_all_gather(value)
        blocks = {name: repeated(raw, value, calls) for name in ("raw", again("raw"))}
        open_epochs = []  # kept, for the loaders to stay where they are
        for name, accelerator in accelerators.items():
            epoch = iter(loaders[name])
            for _ in range(batches):
                next(epoch)
            open_epochs.append(epoch)
            check_metrics(name, accelerator.gather_for_metrics(value), value, rows)
            blocks[name] = repeated(accelerator.gather_for_metrics, value, calls)
        title = f"gather_for_metrics, two tensors, {place}, blocks of {calls} calls"
        sections.append(section("metrics", title, blocks, repeats, calls))
        del open_epochs
    return sections


def check_metrics(name: str, answer: Any, value: Sequence[Tensor], rows: int) -> None:
    """Called on: all ranks. What came back is what raw torch gathers, without the repeated samples."""
    for got, leaf in zip(answer, value, strict=True):
        room = [torch.empty_like(leaf) for _ in range(dist.get_world_size())]
        dist.all_gather(room, leaf)
        if not torch.equal(got, torch.cat(room)[:rows]):
            raise SystemExit(f"{name}: gather_for_metrics gave a wrong result.")


# --- skipping ------------------------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    """Many samples that take no memory."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def new_loader(accelerator: Any, size: int) -> Any:
    return accelerator.prepare(DataLoader(Numbers(size), batch_size=BATCH, shuffle=True))


def skip_block(accelerator: Any, size: int, blocks: int) -> Work:
    """From the call to the first batch, as often as there are blocks: nobody gains by keeping an order."""
    loaders = [new_loader(accelerator, size) for _ in range(blocks)]
    skipped = size * 9 // 10 // BATCH

    def run(ticks: list[float]) -> object:
        torch.manual_seed(SEED)
        epoch = iter(accelerator.skip_first_batches(loaders.pop(), skipped))
        batch = next(epoch)
        ticks.append(clock())
        return epoch, batch

    return run


def randperm_block(size: int) -> Work:
    def run(ticks: list[float]) -> object:
        torch.manual_seed(SEED)
        order = torch.randperm(size)
        ticks.append(clock())
        return order

    return run


def check_skip(name: str, accelerator: Any) -> None:
    """What follows after skipping is what follows in the whole epoch."""
    size, skipped = 1000, 20
    torch.manual_seed(SEED)
    whole = list(new_loader(accelerator, size))
    torch.manual_seed(SEED)
    rest = list(accelerator.skip_first_batches(new_loader(accelerator, size), skipped))
    if len(rest) != len(whole) - skipped or not all(map(torch.equal, rest, whole[skipped:])):
        raise SystemExit(f"{name}: after skip_first_batches other batches follow than in the whole epoch.")


def measure_skipping(libraries: Sequence[str], size: int, repeats: int) -> Section:
    baseline = "randperm"
    title = f"skip_first_batches to 90 % of {size:,} shuffled samples, to the first batch"
    blocks = {name: randperm_block(size) for name in (baseline, again(baseline))}
    missing: dict[str, str] = {}
    for library in libraries:
        accelerator = new_accelerator(library, 1)
        try:
            _ = accelerator.skip_first_batches
        except AttributeError as error:
            missing[library] = f"{type(error).__name__}: {error}"
            continue
        check_skip(library, accelerator)
        blocks[library] = skip_block(accelerator, size, repeats + WARM_UPS)
    settle()
    return section("skipping", title, blocks, repeats, 1, unit="ms", missing=missing)


# --- telling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Report(Conditions):
    """All that was measured, and how."""

    sections: list[Section]
    bars: list[Bar]
    command: str


def find_bars(sections: Sequence[Section]) -> list[Bar]:
    return [
        bar
        for part in sections
        if part.part in TARGETS
        for bar in figure_bars(
            TARGETS[part.part],
            part.figures,
            again(part.figures[0].name),
            short(part.missing["lockstep"]) if "lockstep" in part.missing else None,
        )
    ]


def short(reason: str) -> str:
    """The kind of error only: the whole reason stands below the table."""
    return reason.partition(":")[0]


def tell(report: Report) -> None:
    """Markdown tables, to be kept in docs as they are."""
    console = tell_conditions(report, "row 1", "us or ms")
    for part in report.sections:
        console.print(figures_table(part.title, part.figures, part.unit, list(part.missing)))
        for name, reason in part.missing.items():
            console.print(f"{name}: not measured. {reason}\n", soft_wrap=True)
    if report.bars:
        console.print(bars_table(report.bars, "first row"))
    console.print(f"Made by: {report.command}")


# --- starting ------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time prepared loaders next to plain ones and to Accelerate's.")
    parser.add_argument("--processes", type=int, help="default: 1, or the world this was started in")
    parser.add_argument("--repeats", type=int, default=60, help=f"pairs of blocks; bars need {MIN_RATIOS}")
    parser.add_argument("--batches", type=int, default=313, help="batches an epoch and rank")
    parser.add_argument("--calls", type=int, default=20, help="gathers a block")
    parser.add_argument("--samples", type=int, default=10_000_000, help="size of the data set to skip in")
    parser.add_argument("--skips", type=int, default=31, help="pairs for skipping, of which one takes about a second")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts; default: all that the processes allow")
    parser.add_argument("--contenders", nargs="+", choices=LIBRARIES, default=LIBRARIES, help="next to plain torch")
    parser.add_argument("--quick", action="store_true", help="just to see it run: 3 pairs, no verdicts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep everything in a file, too")
    args = parser.parse_args()
    if args.quick:
        args.repeats = args.skips = 3
    if min(args.repeats, args.skips) < 2:
        parser.error("--repeats, --skips: at least 2, for quartiles")
    return args


def choose_parts(only: Sequence[str] | None, world_size: int) -> list[str]:
    allowed = [part for part in PARTS if (part == "skipping") == (world_size == 1)]
    for part in only or ():
        if part not in allowed:
            raise SystemExit(f"--only {part!r} is not for {world_size} processes; these are: {', '.join(allowed)}.")
    return [part for part in allowed if part in (only or allowed)]


def main() -> None:
    args = parse_arguments()
    world_size = enter_world(args.processes)
    parts = choose_parts(args.only, world_size)
    libraries = [library for library in LIBRARIES if library in args.contenders]
    warnings.simplefilter("ignore")

    load_before = os.getloadavg()[0]
    sections: list[Section] = []
    if world_size == 1:
        sections.append(measure_skipping(libraries, args.samples, args.skips))
    else:
        reading = [part for part in parts if part != "metrics"]
        readings = {part: make_readings(part, libraries, args.batches, world_size) for part in reading}
        settle()
        sections += [measure_reading(part, made, args.repeats, args.batches) for part, made in readings.items()]
        if "metrics" in parts:
            sections += measure_metrics(libraries, 3 * args.repeats, args.calls, world_size)

    report = Report(
        processes=world_size,
        versions=find_versions("torch", "torch-lockstep", "accelerate"),
        cores=os.cpu_count(),
        load_before=load_before,
        sections=sections,
        bars=find_bars(sections),
        command=spell_command("data.py", sys.argv[1:], world_size, args.processes),
    )
    if world_size == 1 or dist.get_rank() == 0:
        tell(report)
        if args.json is not None:
            args.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
    if world_size > 1:
        dist.barrier()


if __name__ == "__main__":
    main()
