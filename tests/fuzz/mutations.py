"""The mirror of the fuzzer: a random valid program with one mistake in it, on one rank, at one step.

Each mistake is in the code below, on a line with a mark. What has to come of it: the job stops, and names the rank and
that line; or, where the mistake does no harm (a micro-batch left out in the middle of an accumulation window), the
program ends with the same weights on all ranks.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fuzz import parts
from tests.fuzz.parts import Batch
from tests.fuzz.program import COLLECTIVES, Program, draw
from tests.fuzz.run import Run

MARK = "# mark: "
CALLS = ("left out", "other call", "opposite order", "shape", "dtype", "structure", "reduction", "raw left out")
"""Mistakes in a collective that is made after a step."""
STEPS = ("skipped backward", "swallowed error", "skipped step", "leaves the loop", "fewer batches")
"""Mistakes in training."""
KINDS = CALLS + STEPS


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A program and the mistake in it."""

    seed: int
    kind: str
    program: Program
    ranks: int
    rank: int
    """The one that makes the mistake."""
    step: int
    """After this one, or in it."""

    def __str__(self) -> str:
        return f"{self.seed}: {self.kind!r} on rank {self.rank} of {self.ranks}, step {self.step}, in {self.program}"


def mutate(seed: int, **choices: Any) -> Mutation:
    """The mutation of a seed, in a program with these choices. The kinds take turns."""
    dice = random.Random(f"mutation {seed}")
    ranks = dice.choice((2, 2, 3, 4))
    fixed: dict[str, Any] = {
        "model": dice.choice(("mlp", "conv_bn", "tied", "frozen", "dict", "tuple")),
        "samples": dice.randint(32, 48),
        "batch_size": dice.choice((1, 2)),
        "sampler": dice.choice(("sequential", "shuffle", "seedable")),
        "stream": False,
        "workers": 0,
        "even_batches": True,
        "split_batches": False,
        "dispatch_batches": False,
        "iteration": "plain",
        "join": False,
        "stop_after": None,
        "skip": 0,
        "resume": None,
        "how": "accumulate",
        "metrics": False,
        "extras": tuple((dice.choice(COLLECTIVES), dice.randint(0, 2)) for _ in range(dice.randint(0, 2))),
    }
    program = draw(seed, **{**fixed, **choices})
    kind = KINDS[seed % len(KINDS)]
    return Mutation(
        seed=seed, kind=kind, program=program, ranks=ranks, rank=dice.randrange(ranks), step=dice.randint(1, 2)
    )


def marks() -> dict[str, str]:
    """Mark -> ``file:line``."""
    return {
        line.rpartition(MARK)[2].strip(): f"{file.name}:{number}"
        for file in (Path(__file__), Path(parts.__file__))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if MARK in line
    }


class MutatedRun(Run):
    """A run in which one rank makes the mistake."""

    def __init__(self, mutation: Mutation, folder: Path) -> None:
        super().__init__("lockstep", mutation.program, folder)
        self.mutation = mutation

    @property
    def wrong(self) -> bool:
        """Whether this is the rank that makes the mistake."""
        return self.rank == self.mutation.rank

    def now(self, kind: str) -> bool:
        """Whether the mistake of this kind is made on this rank, now."""
        here = self.wrong and kind == self.mutation.kind and self.micro_batches == self.mutation.step
        if here:
            fault()
        return here

    def epoch(self, epoch: int) -> None:
        for step, batch in enumerate(self.batches(self.loader)):  # mark: loop
            self.step(batch)
            self.beside(step, batch)
            if epoch == 0 and step == self.mutation.step:
                self.call()
            if self.wrong and self.mutation.kind == "leaves the loop" and step == self.mutation.step:
                fault()
                break

    def batches(self, loader: Any) -> Any:
        if self.mutation.kind != "fewer batches":
            return super().batches(loader)
        batches = list(super().batches(loader))
        if self.wrong:
            fault()
        return iter(batches[: self.mutation.step + 1] if self.wrong else batches)

    def accumulated_step(self, batch: Batch) -> None:
        accelerator, optimizer = self.accelerator, self.optimizers[0]
        with accelerator.accumulate(self.model):
            loss, _ = parts.loss_of(self.models, batch)
            if self.now("skipped backward"):
                return
            try:
                if self.now("swallowed error"):
                    raise ValueError("this batch is broken")
            except ValueError:
                return
            accelerator.backward(loss)  # mark: backward
            if self.now("skipped step"):
                optimizer.zero_grad()
                return
            if accelerator.sync_gradients:
                self.clip()
            optimizer.step()  # mark: step
            if self.schedule is not None:
                self.schedule.step()
            optimizer.zero_grad()
        self.keep(batch, loss, accelerator.sync_gradients)

    def call(self) -> None:
        """The mistakes in collectives."""
        accelerator, kind, wrong = self.accelerator, self.mutation.kind, self.wrong
        if kind in CALLS:
            fault()
        if kind == "left out":
            if not wrong:
                accelerator.gather(torch.ones(2))  # mark: left out
        elif kind == "other call":
            if wrong:
                accelerator.reduce(torch.ones(2))  # mark: other call
            else:
                accelerator.gather(torch.ones(2))
        elif kind == "opposite order":
            if wrong:
                accelerator.wait_for_everyone()  # mark: opposite order
            accelerator.gather(torch.ones(2))
            if not wrong:
                accelerator.wait_for_everyone()
        elif kind == "shape":
            accelerator.gather(torch.ones(3 if wrong else 2))  # mark: shape
        elif kind == "dtype":
            accelerator.gather(torch.ones(2, dtype=torch.float64 if wrong else torch.float32))  # mark: dtype
        elif kind == "structure":
            accelerator.gather([torch.ones(2)] if wrong else {"a": torch.ones(2)})  # mark: structure
        elif kind == "reduction":
            accelerator.reduce(torch.ones(2), "mean" if wrong else "sum")  # mark: reduction
        elif kind == "raw left out" and not wrong:
            dist.all_reduce(torch.ones(2))  # mark: raw left out


LINES = {
    **{kind: kind for kind in CALLS},
    "skipped backward": "backward",
    "swallowed error": "backward",
    "skipped step": "step",
    "leaves the loop": "backward",
    "fewer batches": "backward",
}
"""Kind -> the mark of the line that has to be named."""


def fault() -> None:
    sys.stdout.write(f"fault at {time.time()}\n")
    sys.stdout.flush()


def train(seed: int, **choices: Any) -> list[float]:
    """Called on: all ranks. Run a mutated program; the parameters at its end."""
    faulthandler.disable()  # as in a script: where the pool has not enabled it, a crash is the guard's to record
    with tempfile.TemporaryDirectory() as folder:
        run = MutatedRun(mutate(seed, **choices), Path(folder))
        parameters = list(run.run()["parameters"])
        run.accelerator.gather(torch.ones(1))  # as a script that reports a result
        return parameters
