"""What the black box costs: per event in a hot loop, and per event inside a real training step.

    python benchmarks/blackbox.py

The hot loop has everything in the processor's caches and flatters. Inside a step, what the box needs has been pushed
out by the step's own work, so the second figure is the one that counts: (a step with events - the same step
without) / events, short blocks of both kinds taken in turns, the median over pairs. The events come from functions
inside the package, as they do in a job, so that the user's line has to be looked for. ``no box`` makes the same calls
to a box that keeps nothing: what is left of its figure is the calls themselves.

A busy machine blurs the difference of two steps more than an event costs. Next to it stands, therefore, what a clock
read right before and after each event shows, in the same steps: it misses what the event pushes out of the caches,
and is hardly touched by other processes.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from measure import clock, find_versions, settle
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lockstep
from lockstep.blackbox.box import Box, NoBox
from lockstep.blackbox.peers import Peers
from lockstep.blackbox.read import read_box

EVENTS, BLOCK = 4, 7
BATCH, FEATURES, HIDDEN, CLASSES = 32, 64, 256, 10

# Called as in a job: two frames of the package stand between the box and the user's line.
SOURCE = """
def room(box, name, signature):
    number = box.enter(name, signature, 2)
    try:
        pass
    finally:
        box.leave(number)

def facade(box, sized, clock, spent):
    def mark(name, value):
        before = clock()
        room(box, name, (value.shape, value.dtype) if sized else "tensor")
        spent.append(clock() - before)
    return mark

def phases(box, clock, spent):
    def mark(name, value):
        before = clock()
        box.phase(name)
        spent.append(clock() - before)
    return mark

def nothing(clock, spent):
    def mark(name, value):
        before = clock()
        spent.append(clock() - before)
    return mark
"""
Mark = Callable[[str, Tensor], None]


def load() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(SOURCE, str(Path(lockstep.__file__).with_name("facade.py")), "exec"), names)
    return names


def make_box(folder: Path, rank: int) -> Box:
    return Box.create(
        folder / f"rank_{rank}.box", rank=rank, world_size=2, local_rank=rank, node=0, host="here", pid=os.getpid()
    )


def best(work: Callable[[], object], number: int = 10_000, repeat: int = 15) -> float:
    """Microseconds of one call, in the best of several runs."""
    return min(timeit.repeat(work, number=number, repeat=repeat)) / number * 1e6


def hot(box: Box, meeting: Box, room: Callable[..., None], path: Path) -> None:
    key = ("tensor", (64, 10), torch.float32)
    print("hot loop, us a call (best of 15 runs)")
    rows = {
        "enter + leave, called directly": lambda: box.leave(box.enter("gather", "float32 (64, 10)")),
        "enter + leave, one frame further in, a tuple as signature": lambda: room(box, "gather", key),
        "the same, compared with 1 peer": lambda: room(meeting, "gather", key),
        "the same with no box": lambda: room(NoBox(), "gather", key),
        "phase": lambda: box.phase("forward"),
        "pace": lambda: box.pace(0.1, 0.1, 0.1, 0.1, 0.1, 0.1),
    }
    for name, work in rows.items():
        print(f"  {best(work):6.2f}  {name}")
    number = box.enter("gather", key)
    inner = best(lambda: box.leave(box.enter("gather", key)))
    print(f"  {inner:6.2f}  enter + leave inside another collective")
    print(f"  {best(lambda: read_box(path), number=20):6.0f}  read_box")
    box.leave(number)


class Trainer:
    """A small training loop in which some steps have events."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.inputs = torch.randn(64, BATCH, FEATURES)
        self.targets = torch.randint(CLASSES, (64, BATCH))
        self.place = 0

    def block(self, mark: Mark) -> float:
        """Seconds of the middle one of some steps in a row, as a job runs them."""
        return median(self.step(mark) for _ in range(BLOCK))

    def step(self, mark: Mark) -> float:
        """Seconds of one step."""
        begin = clock()
        self.place = (self.place + 1) % 64
        inputs, targets = self.inputs[self.place], self.targets[self.place]
        outputs = self.model(inputs)
        mark("gather", outputs)
        loss = cross_entropy(outputs, targets)
        mark("reduce(mean)", loss)
        loss.backward()
        mark("backward", loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark("barrier", loss)
        return clock() - begin


def in_step(box: Box, meeting: Box, names: dict[str, Any], pairs: int) -> None:
    trainer = Trainer()
    facade = names["facade"]
    again = "nothing, against itself"
    clocked: dict[str, list[float]] = {}

    def spent(name: str) -> list[float]:
        return clocked.setdefault(name, [])

    nothing = names["nothing"](clock, [])
    rows: dict[str, Mark] = {
        name: facade(kind, sized, clock, spent(name))
        for name, kind, sized in (
            ("no box", NoBox(), False),
            ("site and a text as signature", box, False),
            ("site and shape, dtype as signature", box, True),
            ("the same, and compared with 1 peer", meeting, True),
        )
    }
    rows["phase"] = names["phases"](box, clock, spent("phase"))
    rows[again] = names["nothing"](clock, spent(again))
    added: dict[str, list[float]] = {name: [] for name in rows}
    plain: list[float] = []
    settle()
    shuffle = random.Random(0).shuffle
    order: list[tuple[str, Mark]] = list(rows.items())
    for pair in range(-10, pairs):
        shuffle(order)
        for name, mark in order:
            # Either may be the first: the second finds what the first brought into the caches.
            if pair % 2:
                base, mine = trainer.block(nothing), trainer.block(mark)
            else:
                mine, base = trainer.block(mark), trainer.block(nothing)
            if pair >= 0:
                added[name].append((mine - base) / EVENTS * 1e6)
                plain.append(base * 1e6)
    print(f"\ninside a step of {median(plain):.0f} us, {EVENTS} events a step, us an event")
    print(f"  difference: median of {pairs} pairs of blocks (quartiles of the pairs); clocked: less an empty event")
    empty = median(clocked[again])
    for name, figures in added.items():
        low, _, high = quantiles(figures, n=4)
        shown = f"{median(figures):6.2f}  ({low:6.1f} to {high:5.1f})"
        print(f"  difference {shown}   clocked {(median(clocked[name]) - empty) * 1e6:5.2f}   {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=500)
    arguments = parser.parse_args()
    print(", ".join(f"{name} {version}" for name, version in find_versions("torch", "torch-lockstep").items()))
    print(f"{os.cpu_count()} cores, load before: {os.getloadavg()[0]:.2f}\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        box, peer = make_box(folder, 0), make_box(folder, 1)
        meeting = make_box(folder, 2)  # one that compares, next to the one that does not
        meeting.compare_with(Peers(folder, 2, [1, 2]), lambda name, number, rank: None)
        names = load()
        hot(box, meeting, names["room"], folder / "rank_0.box")
        in_step(box, meeting, names, arguments.pairs)
        for each in (box, peer, meeting):
            each.close("finished")


if __name__ == "__main__":
    main()
