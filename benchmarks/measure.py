"""What the benchmarks share: running contenders in turns, comparing their times, holding them to bars, telling.

All contenders run in the same process, in turns: each repeat runs one short block of every contender, in an order
that keeps changing, and each block is compared with the baseline's block of the same repeat, so that what slows the
machine for a second slows both sides of a pair.
"""

from __future__ import annotations

import gc
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor

MIN_RATIOS = 30
"""Fewer pairs than this do not give a median that a bar may be held against."""
Work = Callable[[list[float]], object]
"""Does several equal pieces of work, and appends the time after each. What it gives back is freed off the clock."""
WARM_UPS = 2
"""Rounds that ``interleave`` runs before it starts to count."""
clock = time.perf_counter


# --- running -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Times:
    """Microseconds for a piece of work, one figure a block; of several ranks the slowest counts."""

    whole: list[float]
    """A block's time over its pieces: with all that happens now and then, on this machine and in the library."""
    typical: list[float]
    """A block's median piece: what others do on the machine meanwhile hardly shows, nor does what is rare."""


def interleave(blocks: Mapping[str, Work], repeats: int, pieces: int) -> dict[str, Times]:
    """Called on: all ranks. Run one block of each in turn, again and again, in an order that keeps changing."""
    together = dist.is_initialized()
    names = list(blocks)
    # Shuffled, not rotated: in a rotation everyone always runs after the same neighbour, and on its warm caches.
    shuffle = random.Random(0).shuffle  # the same on all ranks
    times = {name: Times(whole=[], typical=[]) for name in names}
    for repeat in range(-WARM_UPS, repeats):
        shuffle(names)
        for name in names:
            ticks: list[float] = []
            gc.collect()
            if together:
                dist.barrier()
            begin = clock()
            left = blocks[name](ticks)
            end = clock()
            del left
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


def repeated(call: Callable[[Any], object], value: object, calls: int) -> Work:
    """A block that makes the same call again and again."""

    def run(ticks: list[float]) -> None:
        for _ in range(calls):
            call(value)
            ticks.append(clock())

    return run


def raw_all_gather(leaves: Sequence[Tensor]) -> Callable[[Any], None]:
    """One bare collective over as many bytes as the leaves have, into memory that was allocated before."""
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    packed = leaves[0] if len(leaves) == 1 else torch.zeros(size, dtype=torch.uint8)
    room = [torch.empty_like(packed) for _ in range(dist.get_world_size())]

    def gather(_value: Any) -> None:
        dist.all_gather(room, packed)

    return gather


def new_accelerator(library: str, world_size: int, **data: Any) -> Any:
    """Called on: all ranks. An Accelerator of either library; ``data`` is for its DataLoaderConfiguration."""
    if library == "accelerate":
        # Without it, every rank is silently "0 of 1" on a machine that has no GPU.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    options: dict[str, Any] = {}
    if data:
        options["dataloader_config"] = import_module(f"{library}.utils").DataLoaderConfiguration(**data)
    accelerator = import_module(library).Accelerator(cpu=True, **options)
    check_world(library, accelerator.num_processes, world_size)
    return accelerator


def check_world(library: str, seen: int, world_size: int) -> None:
    if seen != world_size:
        raise SystemExit(f"{library} sees a world of {seen}, not of {world_size}: its figures would mean nothing.")


# --- comparing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One contender next to the baseline; times in microseconds. Of whole blocks, but for the two typical ones."""

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


# --- the bars ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A figure that Lockstep is held to."""

    what: str
    statistic: str
    unit: str
    limit: float
    value: float | None
    """None when there was nothing to measure."""
    noise: float | None
    """The same statistic for the baseline against itself."""
    verdict: str


PAIRS, BESTS, TYPICAL = "whole blocks, median of pairs", "best blocks", "typical pieces, median of pairs"
ADDED = {"added": PAIRS, "added_best": BESTS, "added_typical": TYPICAL}
RATIO = {"ratio": PAIRS, "ratio_of_best": BESTS, "ratio_typical": TYPICAL}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What Lockstep is to reach, and the fields of ``Figures`` that say whether it does, with their names in words."""

    what: str
    unit: str
    limit: float
    statistics: Mapping[str, str]


def verdict(value: float, limit: float, pairs: int, needed: int) -> str:
    if pairs < needed:
        return f"no verdict: {pairs} pairs, {needed} needed"
    return "met" if value <= limit else "NOT MET"


def figure_bars(target: Target, rows: Sequence[Figures], again: str, missing: str | None = None) -> list[Bar]:
    """The bars of one target.

    ``again`` names the row of the baseline against itself; ``missing`` says why there is no row of Lockstep.
    """
    named = {row.name: row for row in rows}
    mine = named.get("lockstep")
    if mine is None and missing is None:
        return []
    bars = []
    for field, words in target.statistics.items():
        value: float | None = None
        judged = f"not measured: {missing}"
        if mine is not None:
            value = float(getattr(mine, field))
            judged = verdict(value, target.limit, mine.pairs, MIN_RATIOS)
        bars.append(
            Bar(
                what=target.what,
                statistic=words,
                unit=target.unit,
                limit=target.limit,
                value=value,
                noise=getattr(named[again], field),
                verdict=judged,
            )
        )
    return bars


# --- telling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Where figures come from."""

    processes: int
    versions: dict[str, str]
    cores: int | None
    load_before: float
    """Of the machine, before this started: figures from a busy machine are worth less."""


LEGEND = """\
best, median: of whole blocks, per piece of work. ratio (to {0}) and added (to {0}, {1}): "pairs" = median over the
pairs of whole blocks, "bests" = of the two best blocks, "typical" = median over the pairs of the blocks' median pieces.
"""


def tell_conditions(conditions: Conditions, baseline: str, units: str = "us") -> Console:
    """Begin the output: where the figures come from and how to read them. Gives the console for the rest."""
    console = Console(width=160, highlight=False)
    console.print(", ".join(f"{name} {version}" for name, version in conditions.versions.items()))
    console.print(f"{conditions.cores} cores, 1 thread a process, load before: {conditions.load_before:.2f}\n")
    console.print(LEGEND.format(baseline, units))
    return console


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    result = Table(title=title, title_justify="left", box=MARKDOWN)
    for number, heading in enumerate(headings):
        figures = number > 0 and rows[0][number][-1:].isdigit()
        result.add_column(heading, justify="right" if figures else "left", no_wrap=True)
    for row in rows:
        result.add_row(*row)
    return result


def figures_table(title: str, rows: Sequence[Figures], unit: str = "us", missing: Sequence[str] = ()) -> Table:
    """A row for each contender; those of whom there are no figures come last."""
    size = {"us": 1, "ms": 1000}[unit]
    headings = [
        unit,
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
            *(
                [
                    row.name,
                    f"{row.best / size:.0f}",
                    f"{row.median / size:.0f}",
                    f"{row.ratio:.3f}",
                    f"{row.ratio_quartiles[0]:.2f}–{row.ratio_quartiles[1]:.2f}",
                    f"{row.ratio_of_best:.3f}",
                    f"{row.ratio_typical:.3f}",
                    f"{row.added / size:+.1f}",
                    f"{row.added_best / size:+.1f}",
                    f"{row.added_typical / size:+.1f}",
                ]
                for row in rows
            ),
            *([name, *["-"] * (len(headings) - 1)] for name in missing),
        ],
    )


def bars_table(bars: Sequence[Bar], baseline: str) -> Table:
    rows = []
    for bar in bars:
        digits = 3 if bar.unit == "x" else 1
        measured, noise = ("-" if value is None else f"{value:.{digits}f}" for value in (bar.value, bar.noise))
        rows.append([bar.what, bar.statistic, bar.unit, measured, f"{bar.limit:g}", bar.verdict, noise])
    headings = ["bar", "statistic", "unit", "lockstep", "at most", "verdict", f"{baseline} against itself"]
    return table("Bars", headings, rows)


def find_versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "(not installed)"
    return found


# --- starting ------------------------------------------------------------------------------------------------------


def enter_world(processes: int | None) -> int:
    """The number of processes; where more were asked for than there are, this starts the script again with as many."""
    world = os.environ.get("WORLD_SIZE")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else Accelerate sets the number of threads by itself
    if world is None and (processes or 1) > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        os.execv(sys.executable, [*launcher, *sys.argv])
    world_size = int(world or 1)
    if processes not in (None, world_size):
        raise SystemExit(f"--processes {processes} was asked for in a world of {world_size}.")
    return world_size


def settle() -> None:
    """To be called when all contenders are made, before the first block."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was loaded so far is left out of the collections between blocks, which then take no time


def spell_command(script: str, words: Sequence[str], world_size: int, processes: int | None) -> str:
    """The command that makes this run again, however the ranks of this one were started."""
    if world_size > 1 and processes is None:
        words = ["--processes", str(world_size), *words]
    return shlex.join(["python", f"benchmarks/{script}", *words])
