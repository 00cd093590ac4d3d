"""Random training programs that are valid: what Accelerate's interface allows, and what people write with it.

A program is a seed: every choice is drawn from it, and ``str(program)`` lists those that differ from the plainest
program there is. A choice can be overridden, ``draw(17, workers=0)``, to find the smallest program that still fails;
what follows from a choice is then settled again, so that the program stays valid.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

MODELS = ("mlp", "mlp", "conv_bn", "tied", "frozen", "dict", "tuple", "unused", "pair", "gan")
ITERATIONS = ("plain", "plain", "plain", "plain", "zip", "cycle", "prefetch", "redraw", "islice", "two_loaders")
SAMPLERS = ("sequential", "shuffle", "seedable", "weighted", "batch_sampler")
COLLECTIVES = (
    "gather",
    "reduce",
    "broadcast_object_list",
    "gather_object",
    "pad",
    "trigger",
    "barrier",
    "split",
    "main_first",
)
MAIN_ONLY = ("main_evaluates_prepared", "main_evaluates_raw", "main_saves", "main_saves_model", "main_logs", "probe")
SHARED = ("evaluate", "peek", "nested", "save_model", "save_state")


@dataclass(frozen=True, kw_only=True)
class Program:
    """The choices. The defaults are the plainest program."""

    seed: int = 0
    model: str = "mlp"
    """``unused``: parts that a batch leaves out; ``pair``: two models with one optimizer; ``gan``: with one each."""
    optimizer: str = "sgd"
    precision: str = "no"
    stream: bool = False
    """Whether the dataset is iterable."""
    samples: int = 24
    batch_size: int = 4
    drop_last: bool = False
    sampler: str = "sequential"
    workers: int = 0
    persistent_workers: bool = False
    even_batches: bool = True
    split_batches: bool = False
    dispatch_batches: bool | None = None
    epochs: int = 1
    iteration: str = "plain"
    """How the loader is iterated. ``redraw``: one rank passes over a batch that it cannot use, and draws another."""
    stop_after: int | None = None
    """All ranks leave each epoch's loop after so many steps."""
    skip: int = 0
    """Batches that ``skip_first_batches`` passes over in the first epoch."""
    resume: str | None = None
    """The first epoch is left after ``resume_at`` batches, and resumed from a saved state: with ``load_state`` alone,
    or with ``skip_first_batches`` after it, as scripts for Accelerate do."""
    resume_at: int = 2
    accumulation: int = 1
    how: str = "accumulate"
    """``accumulate``, or ``no_sync`` around all micro-batches but the last of each window."""
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    clip: str | None = None
    schedule: str | None = None
    join: bool = False
    """Whether the loop runs inside ``join_uneven_inputs``."""
    metrics: bool = False
    """Whether each batch's predictions are gathered for a metric."""
    extras: tuple[tuple[str, int], ...] = ()
    """What else the script does, and after which step of the first epoch."""

    def __str__(self) -> str:
        plain = Program()
        chosen = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name != "seed" and getattr(self, field.name) != getattr(plain, field.name)
        ]
        return f"program {self.seed}: {', '.join(chosen) or 'the plainest program'}"

    @property
    def reads_on_one_rank(self) -> bool:
        """Whether rank 0 reads for all, which makes drawing a batch a collective."""
        return self.stream if self.dispatch_batches is None else self.dispatch_batches

    @property
    def order_is_known(self) -> bool:
        """Whether an epoch has its samples in their own order."""
        return self.sampler == "sequential" and not (self.stream and self.workers)

    def accelerate_agrees(self) -> bool:
        """Whether Accelerate 1.15 does with this program what is right, so that the two can be compared.

        It divides a shorter last window by the full length, joins nothing on the CPU, loads a state without the
        loader's place, loses the repeated samples from sight in streams and after skip_first_batches, fills up and
        skips otherwise where one rank reads for all, ends two iterations of one loader with a third, and refuses
        batches of several sizes.
        """
        return not (
            self.join
            or self.resume
            or (self.accumulation > 1 and self.how == "accumulate")
            or self.reads_on_one_rank
            or self.stream
            or (self.skip and self.metrics)
            or (self.iteration == "zip" and any(name in ("peek", "nested") for name, _ in self.extras))
            or self.sampler == "batch_sampler"
        )


def draw(seed: int, **overrides: Any) -> Program:
    """The program of a seed, with these choices made otherwise. A negative seed is the plainest program."""
    if seed < 0:
        return settle(replace(Program(seed=seed), **overrides))
    dice = random.Random(seed)
    split = dice.random() < 0.15
    drawn = Program(
        seed=seed,
        model=dice.choice(MODELS),
        optimizer=dice.choice(("sgd", "adamw")),
        precision=dice.choice(("no", "no", "no", "bf16")),
        stream=dice.random() < 0.2,
        samples=dice.randint(13, 48),
        batch_size=12 if split else dice.randint(1, 4),  # 12 can be cut for 1 to 4 ranks
        drop_last=dice.random() < 0.25,
        sampler=dice.choice(SAMPLERS),
        workers=dice.choice((0,) * 12 + (1, 2)),
        persistent_workers=dice.random() < 0.5,
        even_batches=dice.random() < 0.85,
        split_batches=split,
        dispatch_batches=dice.choice((None, None, None, False, True)),
        epochs=dice.choice((1, 2)),
        iteration=dice.choice(ITERATIONS),
        stop_after=dice.choice((None, None, None, 1, 2, 3)),
        skip=dice.choice((0, 0, 0, 0, 1, 2)),
        resume=dice.choice((None,) * 5 + ("load_state", "skip_first_batches")),
        resume_at=dice.choice((1, 2)),
        accumulation=dice.choice((1, 1, 2, 3)),
        how=dice.choice(("accumulate", "accumulate", "no_sync")),
        sync_with_dataloader=dice.random() < 0.8,
        sync_each_batch=dice.random() < 0.15,
        clip=dice.choice((None, None, "norm", "value")),
        schedule=dice.choice((None, "lambda", "cosine")),
        metrics=dice.random() < 0.4,
        extras=tuple(
            (dice.choice(dice.choice((COLLECTIVES, MAIN_ONLY, SHARED))), dice.randint(0, 2))
            for _ in range(dice.randint(0, 3))
        ),
    )
    return settle(replace(drawn, **overrides))


def parse(choices: Iterable[str]) -> dict[str, Any]:
    """Choices from a command line: ``workers=1``, ``model='tied'``."""
    return {name: ast.literal_eval(value) for name, _, value in (choice.partition("=") for choice in choices)}


def settle(program: Program) -> Program:
    """The nearest program that is valid: each rule gives up what its condition rules out."""

    def rule(holds: object, **choices: Any) -> None:
        nonlocal program
        program = replace(program, **choices) if holds else program

    rule(program.stream, sampler="sequential")  # a stream has its own order
    # Batches of several sizes can be neither cut nor gathered.
    rule(program.split_batches and program.sampler == "batch_sampler", sampler="sequential")
    rule(program.sampler == "batch_sampler", metrics=False, drop_last=False)
    rule(not program.workers, persistent_workers=False)

    # Ranks may have different numbers of batches: inside join_uneven_inputs they do nothing else together.
    plain: dict[str, Any] = {
        "iteration": "plain",
        "stop_after": None,
        "skip": 0,
        "resume": None,
        "dispatch_batches": False,
    }
    alone: dict[str, Any] = {"extras": (), "metrics": False, "accumulation": 1, "clip": None, "model": "mlp"}
    rule(not program.even_batches, join=True, **plain, **alone)

    # Where one rank reads for all, drawing is a collective: all ranks draw at the same time, from one thread.
    rule(program.iteration in ("prefetch", "redraw") and program.reads_on_one_rank, iteration="plain")
    rule(program.iteration == "redraw", stream=False)
    # Metrics, places and ends are those of one plain iteration. The end of a loader closes accumulation windows: a
    # rank that has drawn further would close its own too early.
    rule(program.iteration != "plain", resume=None, skip=0, metrics=False)
    rule(program.iteration in ("prefetch", "redraw", "zip"), accumulation=1)
    # Gradients that are accumulated by hand are not saved, and a saved place is one in an epoch's only iteration.
    rule(program.resume, stop_after=None, skip=0, how="accumulate", epochs=1)
    rule(program.model in ("gan", "unused"), accumulation=1)
    rule(program.model == "gan", metrics=False)
    rule(program.accumulation == 1 or program.how == "no_sync", sync_with_dataloader=True, sync_each_batch=False)
    rule(program.accumulation == 1, how="accumulate")

    excluded: set[str] = set()
    if program.model == "gan":
        excluded |= {"probe"}
    if program.resume:
        excluded |= {"nested"}  # a whole epoch, which is not trained on
    if program.dispatch_batches:
        excluded |= {"main_evaluates_prepared"}
    rule(excluded, extras=tuple(extra for extra in program.extras if extra[0] not in excluded))
    return program
