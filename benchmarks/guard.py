"""What the guard costs, and how soon it speaks.

    python benchmarks/guard.py cost         a training step and a gather on 2 processes, with the guard and without
    python benchmarks/guard.py debug        debug mode next to the plain call, and next to Accelerate's
    python benchmarks/guard.py diagnosis    seconds from a fault to its explanation on the screen, for each scenario

The first two compare blocks in the same processes, in turns; ``measure.py`` says how. "Without" gives the ranks a black
box that keeps nothing and compares nothing; what is left then is the calls themselves. "clocked" wraps each
call to the box in two looks at the clock, inside the same steps: what an event costs where the step's own work has
emptied the caches. The guard's two threads run in both kinds of blocks; what they take is timed by itself.

For the third, the script of ``tests/faults`` prints when it does what is wrong. The clock stops at the first line on
the screen of the launcher that names the cause.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from faults import SCENARIOS, Told, run_jobs
from loop import Parts, Trainer, make_accelerator, make_parts
from measure import (
    MIN_RATIOS,
    PAIRS,
    TYPICAL,
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
    repeated,
    settle,
    spell_command,
    table,
    tell_conditions,
    verdict,
)
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from lockstep import current
from lockstep.blackbox.box import NoBox
from lockstep.process_group.group import Group
from lockstep.strategies.ddp.reductions import Reductions
from lockstep.strategies.ddp.replica_check import EVERY, ReplicaCheck

OFF, OFF_AGAIN, CLOCKED = "without", "without (again)", "clocked"
PLAIN, PLAIN_AGAIN = "plain", "plain (again)"
EVENT_US, LOOP_RATIO, DEBUG_RATIO, DIAGNOSIS_S = 5.0, 1.01, 1.5, 5.0
REPLICA_RATIO = 1.001


# --- with and without ----------------------------------------------------------------------------------------------


class ClockedBox(NoBox):
    """A box whose calls are timed in place."""

    def __init__(self, box: NoBox, spent: dict[str, list[float]]) -> None:
        super().__init__()
        self._box = box
        self._spent = spent

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        begin = clock()
        result = call(*args)
        self._spent.setdefault(call.__name__, []).append(clock() - begin)
        return result

    # The line of the script is two frames further up than it is for the box itself.

    def enter(self, name: str, signature: Any = None, depth: int = 1, steps: int = 0, batch: int = 0) -> int:
        return int(self._timed(self._box.enter, name, signature, depth + 2, steps, batch))

    def forward(self, depth: int = 1) -> None:
        self._timed(self._box.forward, depth + 2)

    def stepped(self, depth: int = 1) -> None:
        self._timed(self._box.stepped, depth + 2)

    def answered(self) -> None:
        self._timed(self._box.answered)

    def leave(self, seq: int, refused: bool = False) -> None:
        self._timed(self._box.leave, seq, refused)

    def phase(self, name: str, site: bool = False) -> float:
        return float(self._timed(self._box.phase, name, site))

    def step(self, number: int) -> None:
        self._timed(self._box.step, number)

    def pace(self, *seconds: float) -> None:
        self._timed(self._box.pace, *seconds)


@contextmanager
def put(group: Group, box: NoBox) -> Iterator[None]:
    before, group.monitor.box = group.box, box
    try:
        yield
    finally:
        group.monitor.box = before


def in_three_ways(group: Group, work: Work, spent: dict[str, list[float]]) -> dict[str, Work]:
    """The same work with the guard, without it, and with its calls timed."""
    if isinstance(group.box, NoBox) and not hasattr(group.box, "path"):
        raise SystemExit(f"There is no black box ({group.box.reason}), so there is nothing to compare.")
    clocked = ClockedBox(group.box, spent)
    search = Reductions._reached

    def search_timed(reductions: Reductions, loss: Any) -> Any:
        begin = clock()
        found = search(reductions, loss)
        spent.setdefault("search of the graph", []).append(clock() - begin)
        return found

    def off(ticks: list[float]) -> object:
        with put(group, NoBox()):
            return work(ticks)

    def timed(ticks: list[float]) -> object:
        with put(group, clocked), patch.object(Reductions, "_reached", search_timed):
            return work(ticks)

    return {OFF: off, OFF_AGAIN: off, "lockstep": work, CLOCKED: timed}


# --- cost ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Event:
    """One kind of call to the box, timed inside the work."""

    work: str
    name: str
    per_piece: float
    """How often it is made in one piece of work."""
    median_us: float
    """Less what the two looks at the clock take."""


def larger(parts: Parts, steps: int, world_size: int) -> Parts:
    """A model whose step takes some milliseconds."""
    width, batch = 512, 16
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    size = steps * batch * world_size
    dataset = TensorDataset(torch.randn(size, width), torch.randint(0, 10, (size,)))
    return Parts(model=model, optimizer=optimizer, scheduler=LambdaLR(optimizer, lambda step: 1.0), dataset=dataset)


def events(work: str, spent: dict[str, list[float]], pieces: int) -> list[Event]:
    empty = median(_clock_twice() for _ in range(10_000))
    return [
        Event(
            work=work,
            name=name,
            per_piece=round(len(times) / pieces, 2),
            median_us=max(0.0, (median(times) - empty) * 1e6),
        )
        for name, times in spent.items()
    ]


def _clock_twice() -> float:
    begin = clock()
    return clock() - begin


def event_bars(found: Sequence[Event]) -> list[Bar]:
    """An event is one collective: entered, which compares it with the other ranks, and left."""
    bars = []
    for work in dict.fromkeys(event.work for event in found):
        parts = {event.name: event.median_us for event in found if event.work == work}
        whole = sum(parts.get(name, 0.0) for name in ("enter", "leave"))
        bars.append(
            Bar(
                what=f"a collective's event, {work}",
                statistic="clocked in place, medians",
                unit="us",
                limit=EVENT_US,
                value=whole,
                noise=None,
                verdict=verdict(whole, EVENT_US, MIN_RATIOS, MIN_RATIOS),
            )
        )
    return bars


def share_bar(work: str, found: Sequence[Event], median_us: float, repeats: int) -> Bar:
    """All calls to the box in a step over the step without them: a busy machine hardly blurs it."""
    spent = sum(event.per_piece * event.median_us for event in found if event.work == work)
    value = 1 + spent / median_us
    return Bar(
        what=f"{work}, with over without",
        statistic="calls clocked in place, medians",
        unit="x",
        limit=LOOP_RATIO,
        value=value,
        noise=None,
        verdict=verdict(value, LOOP_RATIO, repeats, MIN_RATIOS),
    )


def replica_bar(work: str, model: nn.Module, group: Group, step_us: float) -> Bar:
    """Called on: all ranks. One comparison of the ranks' weights over the steps between two of them."""
    check, named, spent = ReplicaCheck(group), list(model.named_parameters()), []
    for number in range(1, 2 * MIN_RATIOS + 1):
        begin = clock()
        check.check(number * EVERY, named)  # posts the checksums
        middle = clock()
        dist.barrier()
        resumed = clock()
        check.check(number * EVERY + 1, named)  # compares them, on rank 0
        spent.append(middle - begin + clock() - resumed)
        dist.barrier()
    share = 1 + median(spent) * 1e6 / (EVERY * step_us)
    return Bar(
        what=f"{work}, comparing weights",
        statistic=f"{median(spent) * 1e6:.0f} us each",
        unit="x",
        limit=REPLICA_RATIO,
        value=share,
        noise=None,
        verdict=verdict(share, REPLICA_RATIO, len(spent), MIN_RATIOS),
    )


def measure_cost(args: argparse.Namespace, world_size: int) -> Report:
    """Called on: all ranks."""
    trainers: dict[str, tuple[Trainer, int, int]] = {}
    for name, build, steps, repeats in (
        ("small step", None, args.steps, args.repeats),
        ("larger step", larger, max(5, args.steps // 3), max(2, args.repeats // 2)),
    ):
        parts = make_parts(steps, world_size)
        parts = parts if build is None else build(parts, steps, world_size)
        trainers[name] = make_accelerator("lockstep", parts, world_size), steps, repeats
    group = current.require().group
    settle()
    rows: dict[str, list[Figures]] = {}
    found: list[Event] = []
    bars: list[Bar] = []

    def measure(name: str, work: Work, repeats: int, pieces: int, target: Target) -> None:
        spent: dict[str, list[float]] = {}
        times = interleave(in_three_ways(group, work, spent), repeats, pieces)
        rows[name] = [compare(kind, times[kind], times[OFF]) for kind in times]
        total = (repeats + WARM_UPS) * pieces  # rounds that are not counted are clocked too
        found.extend(events(name, spent, total))
        bars.extend(figure_bars(target, rows[name], OFF_AGAIN))
        if target.unit == "x":
            bars.append(share_bar(name, found, rows[name][0].median, repeats))

    for name, (trainer, steps, repeats) in trainers.items():
        target = Target(
            what=f"{name}, with over without",
            unit="x",
            limit=LOOP_RATIO,
            statistics={"ratio": PAIRS, "ratio_typical": TYPICAL},
        )
        measure(name, trainer.epoch, repeats, steps, target)
        bars.append(replica_bar(name, trainer.model, group, rows[name][0].median))
    gather = next(iter(trainers.values()))[0].gather
    assert gather is not None
    target = Target(
        what="added to a gather", unit="us", limit=EVENT_US, statistics={"added": PAIRS, "added_typical": TYPICAL}
    )
    call = repeated(gather, torch.randn(64, 10), args.calls)
    measure("gather of one tensor", call, 3 * args.repeats, args.calls, target)
    return Report(
        **conditions(world_size, args),
        figures=rows,
        events=found,
        background=background(),
        bars=[*bars, *event_bars(found)],
    )


@dataclass(frozen=True, kw_only=True)
class Background:
    """A thread of the guard that looks twice a second."""

    name: str
    look_us: float
    share: float
    """Of one core."""


def background() -> list[Background]:
    """On this rank; the watcher is in the launcher, or in local rank 0 where the launcher is another."""
    guard: Any = current._slot.guard
    looks: dict[str, Callable[[], object]] = {"reporter, in every rank": guard._reporter.poll}
    if guard._watcher is not None:
        looks["watcher, one on a machine"] = guard._watcher.poll
    found = []
    for name, look in looks.items():
        look_us = median(_seconds(look) for _ in range(200)) * 1e6
        found.append(Background(name=name, look_us=look_us, share=2 * look_us / 1e6))
    return found


def _seconds(work: Callable[[], object]) -> float:
    begin = clock()
    work()
    return clock() - begin


# --- debug mode ----------------------------------------------------------------------------------------------------


def measure_debug(args: argparse.Namespace, world_size: int) -> Report:
    """Called on: all ranks. Each library's debug mode against its own plain call."""
    mine = new_accelerator("lockstep", world_size)
    os.environ["ACCELERATE_DEBUG_MODE"] = "1"  # only now: Lockstep knows this name, too
    theirs = new_accelerator("accelerate", world_size)
    group = current.require().group
    from accelerate import PartialState

    def theirs_checked(value: bool) -> None:
        PartialState().debug = value

    def mine_checked(value: bool) -> None:
        group.debug = value

    if not PartialState().debug:
        raise SystemExit("Accelerate is not in debug mode: its figures would mean nothing.")
    theirs_checked(False)
    mine_checked(False)
    single = torch.randn(64, 10)
    values = {
        "one tensor": single,
        "structure": {"logits": single, "rest": (torch.arange(64), torch.rand(64, 4) > 0.5)},
    }
    settle()
    rows: dict[str, list[Figures]] = {}
    bars: list[Bar] = []
    for kind, value in values.items():
        plain, other = repeated(mine.gather, value, args.calls), repeated(theirs.gather, value, args.calls)
        blocks: dict[str, Work] = {
            PLAIN: plain,
            PLAIN_AGAIN: plain,
            "lockstep": checked(plain, mine_checked),
            "accelerate, plain": other,
            "accelerate": checked(other, theirs_checked),
        }
        times = interleave(blocks, 2 * args.repeats, args.calls)
        own = f"gather, {kind}: Lockstep's debug mode over Lockstep's plain call"
        rows[own] = [compare(name, times[name], times[PLAIN]) for name in (PLAIN, PLAIN_AGAIN, "lockstep")]
        beside = f"gather, {kind}: Accelerate's debug mode over Accelerate's plain call"
        rows[beside] = [
            compare(name, times[name], times["accelerate, plain"]) for name in ("accelerate, plain", "accelerate")
        ]
        rows[f"gather, {kind}: both in debug mode"] = [
            compare(name, times[name], times["lockstep"]) for name in ("lockstep", "accelerate")
        ]
        target = Target(
            what=f"debug mode, {kind}",
            unit="x",
            limit=DEBUG_RATIO,
            statistics={"ratio": PAIRS, "ratio_typical": TYPICAL},
        )
        bars += figure_bars(target, rows[own], PLAIN_AGAIN)
    return Report(**conditions(world_size, args), figures=rows, bars=bars)


def checked(work: Work, switch: Callable[[bool], None]) -> Work:
    def run(ticks: list[float]) -> object:
        switch(True)
        try:
            return work(ticks)
        finally:
            switch(False)

    return run


# --- from the fault to the diagnosis -------------------------------------------------------------------------------


def measure_diagnosis(args: argparse.Namespace) -> Report:
    found = run_jobs(args.scenarios or SCENARIOS, args.launchers, args.runs)
    slowest = {
        launcher: max(max(told.diagnosis_s) for told in found if told.launcher == launcher)
        for launcher in args.launchers
    }
    bars = [
        Bar(
            what=f"fault to diagnosis, {launcher}",
            statistic="slowest scenario",
            unit="s",
            limit=DIAGNOSIS_S,
            value=value,
            noise=None,
            verdict="met" if value <= DIAGNOSIS_S else "NOT MET",
        )
        for launcher, value in slowest.items()
    ]
    return Report(**conditions(2, args), told=found, bars=bars)


# --- telling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Report(Conditions):
    """All that was measured, and how."""

    command: str
    bars: list[Bar]
    figures: dict[str, list[Figures]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    background: list[Background] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)


def conditions(world_size: int, args: argparse.Namespace) -> dict[str, Any]:
    words = [word for word in sys.argv[1:] if word != "--json"]
    return {
        "processes": world_size,
        "versions": find_versions("torch", "torch-lockstep", "accelerate"),
        "cores": os.cpu_count(),
        "load_before": args.load_before,
        "command": spell_command("guard.py", words, 1, None),
    }


def tell(report: Report) -> None:
    """Markdown tables, to be kept in docs as they are."""
    console = tell_conditions(report, "the first row") if report.figures else Console(width=160, highlight=False)
    for title, rows in report.figures.items():
        console.print(figures_table(title, rows))
    if report.events:
        rows_ = [[event.work, event.name, f"{event.per_piece:g}", f"{event.median_us:.2f}"] for event in report.events]
        console.print(table("Calls to the black box, clocked in place", ["in", "call", "a piece", "us"], rows_))
    if report.background:
        rows_ = [[row.name, f"{row.look_us:.0f}", f"{100 * row.share:.3f}"] for row in report.background]
        console.print(table("Threads, two looks a second", ["thread", "us a look", "% of a core"], rows_))
    if report.told:
        rows_ = [
            [
                told.scenario,
                told.launcher,
                f"{median(told.diagnosis_s):.2f}",
                f"{max(told.diagnosis_s):.2f}",
                f"{median(told.over_s):.2f}",
                str(told.code),
            ]
            for told in report.told
        ]
        headings = ["scenario", "launcher", "diagnosis, median", "slowest", "job over, median", "exit code"]
        title = f"Seconds from the fault; {len(report.told[0].diagnosis_s)} jobs each, 2 ranks"
        console.print(table(title, headings, rows_))
    console.print(bars_table(report.bars, "the baseline"))
    console.print(f"Made by: {report.command}")


# --- starting ------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["cost", "debug", "diagnosis"])
    parser.add_argument("--repeats", type=int, default=100, help=f"pairs of blocks; bars need {MIN_RATIOS}")
    parser.add_argument("--steps", type=int, default=60, help="training steps a block (cost)")
    parser.add_argument("--calls", type=int, default=20, help="gathers a block (cost, debug)")
    parser.add_argument("--runs", type=int, default=1, help="jobs for each scenario (diagnosis)")
    parser.add_argument("--launchers", nargs="+", choices=["lockstep", "torchrun"], default=["lockstep", "torchrun"])
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), help="default: all (diagnosis)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("--repeats: at least 2, for quartiles")
    return args


def use_own_run_directory() -> None:
    """Before the ranks are started: their run directory is no place for the user's own."""
    if "LOCKSTEP_RUN_DIR" not in os.environ:
        os.environ["LOCKSTEP_RUN_DIR"] = tempfile.mkdtemp(prefix="lockstep-bench-")
        os.environ["LOCKSTEP_BENCH_RUN_DIR"] = os.environ["LOCKSTEP_RUN_DIR"]


def main() -> None:
    args = parse_arguments()
    args.load_before = os.getloadavg()[0]
    if args.part == "diagnosis":
        show(measure_diagnosis(args), args.json)
        return
    use_own_run_directory()
    world_size = enter_world(2)
    made = os.environ.get("LOCKSTEP_BENCH_RUN_DIR")
    if made and os.environ.get("RANK") == "0":
        atexit.register(shutil.rmtree, made, ignore_errors=True)
    warnings.simplefilter("ignore")
    report = (measure_cost if args.part == "cost" else measure_debug)(args, world_size)
    if dist.get_rank() == 0:
        show(report, args.json)
    dist.barrier()


def show(report: Report, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        tell(report)


if __name__ == "__main__":
    main()
