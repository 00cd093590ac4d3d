"""A bad loss or gradient was met: which module made it, on which rank, from which samples; told once for the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.data.global_batch import GlobalBatch, name_samples
from lockstep.errors import NumericsError
from lockstep.logging import get_logger
from lockstep.numerics import report
from lockstep.numerics.aggregate import NonFiniteFinding, claim, forget, put_together
from lockstep.numerics.detector import DebugUnderflowOverflow
from lockstep.numerics.process import append_report
from lockstep.numerics.replay import replay
from lockstep.numerics.replay_buffer import Forward
from lockstep.numerics.report import Hit
from lockstep.training.state import TrainingState

_REPLAYS = 5
"""So many bad batches are run once more; after that each is told in a line."""
_APART = 8
"""Bad batches after which no rank is behind at an earlier one: each was followed by an update, or agreed on."""
_TOLD_AT = frozenset((10, 100, 1000, 10_000, 100_000))


class NanReporter:
    """Looks into bad batches of one accelerator, and tells."""

    def __init__(self, state: TrainingState, folder: Path | None, models: Sequence[nn.Module]) -> None:
        self._group, self._number, self._folder, self._models = state.group, state.number, folder, models
        self._found = 0
        self._silent = False

    def warn(self, update: int, what: str, samples: Any, forwards: list[Forward]) -> None:
        """Tell of the first bad number, and now and then that there are more."""
        self._found += 1
        if self._found == 1:
            # What one rank's batch has done reaches the others with the next update: they would tell of the same.
            self._silent = claim(self._group, self._named("warned")) != self._group.rank
        if self._silent:
            return
        if self._found == 1:
            mine = self._finding(what, samples, forwards)
            self.log(f"Update {update}, {mine.headline()}.\n{mine.report}\n{_CHOICES}")
        elif self._found in _TOLD_AT:
            self.log(f"Update {update}: {what}; {self._found} bad numbers so far.")

    def update(self, what: str, samples: Any, forwards: list[Forward], *, alone: bool) -> tuple[str, bool]:
        """Called on: all ranks, unless ``alone``. What is to be told of an update; whether this rank tells it."""
        self._found += 1
        for kind in ("hit", "alone"):
            forget(self._group, self._named(f"{kind}{self._found - _APART}"))
        mine = self._finding(what, samples, forwards)
        if alone:
            name = self._named(f"alone{self._found}")
            return f"{mine.headline()}\n{mine.report}", claim(self._group, name) == self._group.rank
        return put_together(self._group, self._named(f"hit{self._found}"), mine)

    def _named(self, what: str) -> str:
        return f"{self._number}/{what}"

    def log(self, text: str) -> None:
        """Tell it, and keep it with the run."""
        get_logger("lockstep.numerics").warning("%s", text.rstrip(), main_process_only=False)
        append_report(self._folder, self._group.rank, text)

    def _finding(self, what: str, samples: Any, forwards: list[Forward]) -> NonFiniteFinding:
        hit, words = _search(forwards) if self._found <= _REPLAYS else (None, "")
        own = hit is not None or "loss" in what
        if hit is not None:
            words = report.render_hit(hit, title=_AGAIN).strip()
            what = what or hit.line()
        elif "norm" in what:
            words = "The forward is finite, the backward is not; clipping has spread it over all gradients."
        elif "loss is" not in what:
            words = _bad_gradients(self._models) or words
        spelled = spell_samples(samples)
        rank = self._group.rank if self._group.world_size > 1 else None
        return NonFiniteFinding(rank=rank, what=what, samples=spelled, report=words, own=own)


_AGAIN = "The batch was run once more with the same random numbers:"
_CHOICES = "nan_policy='skip' drops such updates on all ranks together, nan_policy='stop' ends the run at the first."


def _search(forwards: list[Forward]) -> tuple[Hit | None, str]:
    """Run the batches once more; the first bad number, or what was learned instead."""
    if not forwards:
        return None, (
            "The batch could not be run again: no forward of a prepared model was seen. Compiled models are not "
            "followed; debug='underflow_overflow' runs them uncompiled and looks at every module."
        )
    words = ""
    for forward in forwards:
        found = replay(forward)
        if isinstance(found, Hit):
            return found, ""
        if found is not None:
            words = f"Running the batch once more failed ({found})."
    return None, words or (
        "Run once more with the same random numbers, the forward of the model is finite: the loss made it, or what is "
        "computed between the model and the loss."
    )


def _bad_gradients(models: Sequence[nn.Module]) -> str:
    """Where a backward went bad, told from which parameters' gradients are."""
    names = [name for model in models for name in _with_bad_gradient(model)]
    if not names:
        return ""
    rest = f", and {len(names) - 1} more before it" if len(names) > 1 else ""
    return (
        f"The forward is finite, the backward is not. Of the parameters with a bad gradient, {names[-1]} is the last "
        f"one of the model{rest}: a backward runs from the end to the beginning, so it went bad at that module, or "
        "right after it. debug='underflow_overflow' looks at every gradient as it is made."
    )


def _with_bad_gradient(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            yield name


def attach_detector(
    model: nn.Module, state: TrainingState, folder: Path | None, **options: Any
) -> DebugUnderflowOverflow:
    """The full detector on one model of a job: the first rank that finds something tells, and ends the job for all."""
    group = state.group

    def found(hit: Hit) -> None:
        first = claim(group, "detected")
        if first != group.rank:
            raise NumericsError(f"Rank {first} found a bad number first; its report tells where. Here: {hit.line()}.")
        place = f"rank {group.rank}" if group.world_size > 1 else ""
        who = (place, spell_samples(state.current_batch.round))
        text = report.render_hit(hit, who=", ".join(part for part in who if part))
        print(text, flush=True)
        kept = append_report(folder, group.rank, text)
        if group.world_size > 1:
            group.abort(f"NumericsError: {hit.line()}", leaving=True)
        raise NumericsError(report.reason(hit, place, kept))

    return DebugUnderflowOverflow(model, found=found, rank=group.rank, world_size=group.world_size, **options)


def spell_samples(now: GlobalBatch | None) -> str:
    """Which samples a batch is made of; empty where nobody knows."""
    return "" if now is None or not now.ids else name_samples(now.ids)
