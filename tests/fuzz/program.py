"""Random training programs that are valid: what Accelerate's interface allows, and what people write with it.

A program is a seed: every choice is drawn from it, and ``str(program)`` lists those that differ from the plainest
program there is. A choice can be overridden, ``draw(17, workers=0)``, to find the smallest program that still fails;
what follows from a choice is then settled again, so that the program stays valid.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

MODELS = ("mlp", "mlp", "conv_bn", "tied", "frozen", "dict", "tuple", "unused", "gan")
ITERATIONS = ("plain", "plain", "plain", "plain", "zip", "cycle", "prefetch", "redraw", "islice")
SAMPLERS = ("sequential", "shuffle", "seedable", "weighted", "batch_sampler")
COLLECTIVES = ("gather", "reduce", "broadcast_object_list", "gather_object", "pad", "trigger", "barrier")
MAIN_ONLY = ("main_evaluates_prepared", "main_evaluates_raw", "main_saves", "main_saves_model", "main_logs", "probe")
SHARED = ("evaluate", "peek", "save_model", "save_state")


@dataclass(frozen=True, kw_only=True)
class Program:
    """The choices. The defaults are the plainest program."""

    seed: int = 0
    model: str = "mlp"
    """``unused`` has parts that a batch leaves out; ``gan`` is two models with an optimizer each."""
    optimizer: str = "sgd"
    precision: str = "no"
    stream: bool = False
    """Whether the dataset is iterable."""
    samples: int = 24
    batch_size: int = 4
    drop_last: bool = False
    sampler: str = "sequential"
    workers: int = 0
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
    """``load_state``: the first epoch is left after ``resume_at`` batches, and resumed from a saved state."""
    resume_at: int = 2
    accumulation: int = 1
    how: str = "accumulate"
    """``accumulate``, or ``no_sync`` around all micro-batches but the last of each window."""
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
        return f"draw({self.seed}): {', '.join(chosen) or 'the plainest program'}"

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
        loader's place, loses the repeated samples from sight in streams and after skip_first_batches, skips too little
        where one rank reads for all, and refuses batches of several sizes.
        """
        return not (
            self.join
            or self.resume
            or (self.accumulation > 1 and self.how == "accumulate")
            or self.stream
            or (self.skip and (self.metrics or self.reads_on_one_rank))
            or self.sampler == "batch_sampler"
        )


def draw(seed: int, **overrides: Any) -> Program:
    """The program of a seed, with these choices made otherwise."""
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
        even_batches=dice.random() < 0.85,
        split_batches=split,
        dispatch_batches=dice.choice((None, None, None, False, True)),
        epochs=dice.choice((1, 2)),
        iteration=dice.choice(ITERATIONS),
        stop_after=dice.choice((None, None, None, 1, 2, 3)),
        skip=dice.choice((0, 0, 0, 0, 1, 2)),
        resume=dice.choice((None,) * 5 + ("load_state",)),
        resume_at=dice.choice((1, 2)),
        accumulation=dice.choice((1, 1, 2, 3)),
        how=dice.choice(("accumulate", "accumulate", "no_sync")),
        clip=dice.choice((None, None, "norm", "value")),
        schedule=dice.choice((None, "lambda", "cosine")),
        metrics=dice.random() < 0.4,
        extras=tuple(
            (dice.choice(dice.choice((COLLECTIVES, MAIN_ONLY, SHARED))), dice.randint(0, 2))
            for _ in range(dice.randint(0, 3))
        ),
    )
    return settle(replace(drawn, **overrides))


def settle(program: Program) -> Program:
    """The nearest program that is valid: on each line, what the left side rules out."""
    change: dict[str, Any] = {}
    if program.stream:
        change |= {"sampler": "sequential"}  # a stream has its own order
    if program.split_batches and program.sampler == "batch_sampler":
        change |= {"sampler": "sequential"}  # batches of several sizes cannot all be cut
    if not program.even_batches:
        # Ranks may have different numbers of batches: inside join_uneven_inputs they do nothing else together, and
        # one rank that reads for all would wait there for those that are through.
        change |= {"join": True, "iteration": "plain", "stop_after": None, "skip": 0, "resume": None, "model": "mlp"}
        change |= {"extras": (), "metrics": False, "accumulation": 1, "dispatch_batches": False, "clip": None}
    program = replace(program, **change)
    change = {}
    if program.iteration in ("prefetch", "redraw") and program.reads_on_one_rank:
        change |= {"iteration": "plain"}  # drawing is a collective there
    program = replace(program, **change)
    change = {}
    if program.iteration in ("zip", "cycle", "prefetch", "redraw", "islice"):
        change |= {"resume": None, "skip": 0, "metrics": False}  # these ask for the place in one plain iteration
    if program.iteration in ("prefetch", "redraw", "zip"):
        # Ranks are not at the same batch of the loader; its end would close windows at different steps.
        change |= {"accumulation": 1}
    if program.iteration == "redraw":
        change |= {"stream": False}
    if program.resume:
        # Gradients that are accumulated by hand are not saved, and a state is of one epoch's iteration.
        change |= {"stop_after": None, "skip": 0, "how": "accumulate", "epochs": 1}
    if program.model in ("gan", "unused"):
        change |= {"accumulation": 1}
    if program.model == "gan":
        change |= {"metrics": False}
    if program.sampler == "batch_sampler":
        change |= {"metrics": False, "drop_last": False}  # batches of several sizes cannot be gathered
    if program.accumulation == 1:
        change |= {"how": "accumulate"}
    program = replace(program, **change)
    extras = [
        (name, step)
        for name, step in program.extras
        # The forward of a model with buffers is a collective, and so is one that is not followed by its backward here.
        if not (name == "probe" and program.model in ("conv_bn", "unused", "gan"))
        # A second iteration in the middle of the first one is not what a saved state is of.
        and not (name in ("peek", "evaluate", "save_state") and program.resume)
        # One rank would read for all.
        and not (name == "main_evaluates_prepared" and program.dispatch_batches)
    ]
    return replace(program, extras=tuple(extras))
