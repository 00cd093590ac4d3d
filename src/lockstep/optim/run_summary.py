"""How many samples one update is made of: the record of a run's set-up, its line, and what changed since the last run.

Everything here is a judgement from numbers; ``run_file.py`` keeps the record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from typing import Any

import torch

from lockstep import __version__


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What decides whether two runs can be compared, as it was at the first update."""

    per_process: int | None
    """Samples in one process's batch; None when the loader does not say."""
    processes: int
    """Processes in the job."""
    accumulation: int
    """Micro-batches per update."""
    learning_rate: float | None
    """Of the optimizer's first group, before the update; None when it has none."""
    other_rates: int = 0
    """Groups whose learning rate is another one."""
    seed: int | None
    """Torch's seed on the main process; None when nobody has set one."""
    precision: str
    """Precision of the forward pass."""
    lockstep: str
    """Our version."""
    torch: str
    """Torch's version."""
    time: str
    """When the first update was made, in UTC."""

    @property
    def effective_batch(self) -> int | None:
        """Samples that one update is made of; None when unknown."""
        return None if self.per_process is None else self.per_process * self.processes * self.accumulation

    def line(self) -> str:
        """The record in one line, for people."""
        shape = f"{_count(self.processes, 'process')} x {self.accumulation} accumulation"
        if self.per_process is None:
            batch = f"effective batch unknown: the loader does not say its batch size ({shape})"
        else:
            batch = f"effective batch {self.effective_batch} ({self.per_process} per process x {shape})"
        rate = "unknown" if self.learning_rate is None else f"{self.learning_rate:g}"
        others = f" (and {_count(self.other_rates, 'other group')})" if self.other_rates else ""
        seed = "no seed set" if self.seed is None else f"seed {self.seed}"
        return f"{batch}, learning rate {rate}{others}, {seed}, precision {self.precision}"

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values, which JSON and checkpoints can hold."""
        return {"effective_batch": self.effective_batch, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> RunSummary:
        """The record that ``to_dict`` gave; a ValueError says what is wrong with other values."""
        if not isinstance(values, Mapping):
            raise ValueError(f"a {type(values).__name__} is no record")
        missing = [field.name for field in fields(cls) if field.name not in values]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing")
        for name in ("per_process", "processes", "accumulation"):
            value = values[name]
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (value is None and name == "per_process"):
                raise ValueError(f"{name} is {value!r}")
        rate = values["learning_rate"]
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float))):
            raise ValueError(f"learning_rate is {rate!r}")
        return cls(**{field.name: values[field.name] for field in fields(cls)})


def record_of(
    *,
    total_batch: int | None,
    processes: int,
    accumulation: int,
    groups: Sequence[Mapping[str, Any]],
    seed: int | None,
    precision: str,
) -> RunSummary:
    """The record of a run, made now.

    ``total_batch`` is what all processes work on at a time, ``groups`` are the optimizer's parameter groups.
    """
    rates = [None if group.get("lr") is None else float(group["lr"]) for group in groups]
    first = rates[0] if rates else None
    return RunSummary(
        # At least 1: no loader gives a process an empty batch.
        per_process=None if total_batch is None else max(1, total_batch // processes),
        processes=processes,
        accumulation=accumulation,
        learning_rate=first,
        other_rates=sum(rate != first for rate in rates),
        seed=seed,
        precision=precision,
        lockstep=__version__,
        torch=torch.__version__,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def restored(effective_batch: int, now: RunSummary) -> tuple[int, int] | None:
    """Batch per process and accumulation that give this effective batch on the processes there are now.

    The accumulation stays if it can; else the batch per process; else that gets no larger, as memory may be short.
    None when no whole numbers do.
    """
    share, rest = divmod(effective_batch, now.processes)
    if rest or not share:
        return None
    if share % now.accumulation == 0:
        return share // now.accumulation, now.accumulation
    largest = share if now.per_process is None else min(now.per_process, share)
    batch = next(size for size in range(largest, 0, -1) if share % size == 0)
    return batch, share // batch


def compare(before: RunSummary, now: RunSummary) -> str | None:
    """What to say when the effective batch is not the one of the run before; None when it is, or is unknown."""
    old, new = before.effective_batch, now.effective_batch
    if old is None or new is None or old == new:
        return None
    found = restored(old, now)
    if found is None:
        restore = f"{old} cannot be had on {now.processes} processes in whole numbers"
    else:
        batch, accumulation = found
        with_what = "and" if accumulation != now.accumulation else "with the present"
        restore = (
            f"for {old} again, use {_count(batch, 'sample')} per process on the present "
            f"{_count(now.processes, 'process')}, {with_what} gradient_accumulation_steps={accumulation}"
        )
    return (
        f"The run before in this project directory had an effective batch of {old} ({_shape(before)}), this one has "
        f"{new} ({_shape(now)}): results will differ. Either {restore}; or keep {new}{_scaled(before, now, new / old)}."
    )


def compare_loaded(saved: Any, now: RunSummary) -> list[str]:
    """The same for the record in a checkpoint that was loaded, where there is one that can be read."""
    try:
        difference = None if saved is None else compare(RunSummary.from_dict(saved), now)
    except ValueError:
        return []
    return [] if difference is None else [difference]


def _scaled(before: RunSummary, now: RunSummary, factor: float) -> str:
    if before.learning_rate is None:
        return " and see whether the learning rate fits"
    rate = before.learning_rate * factor
    text = f" with the learning rate scaled linearly, from {before.learning_rate:g} to {rate:g}"
    if now.learning_rate is None:
        return text
    if math.isclose(rate, now.learning_rate, rel_tol=1e-6):
        return f"{text}, as it is already"
    return f"{text} (it is {now.learning_rate:g})"


def _shape(record: RunSummary) -> str:
    return f"{record.per_process} x {_count(record.processes, 'process')} x {record.accumulation}"


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
