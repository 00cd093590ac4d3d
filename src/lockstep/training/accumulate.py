"""One micro-batch of an accumulation window: whether its backward averages gradients or holds them back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lockstep.errors import UsageError
from lockstep.optim.unprepared_check import refuse_strangers
from lockstep.training.state import TrainingState


class MicroBatch(AbstractContextManager[None]):
    """The region of ``accumulate``; a class, because entering a generator costs twice as much."""

    __slots__ = ("_held", "_models", "_rates", "_state")

    def __init__(self, state: TrainingState, models: tuple[nn.Module, ...]) -> None:
        if state.accumulation.num_steps > 1:
            refuse_strangers(state.accumulation, state.parameters)
        self._state = state
        self._models = models
        self._rates: list[Any] = []
        self._held: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        accumulation = self._state.accumulation
        if accumulation.inside:
            raise UsageError("accelerator.accumulate() is open already. Pass several models to one: accumulate(a, b).")
        sync = accumulation.advance()
        accumulation.inside = True
        if not sync:
            self._rates = self._state.schedule_check.rates()
        if not sync and not accumulation.sync_each_batch:
            for model in self._models:
                held = self._state.strategy.no_sync(model)
                if held is not None:
                    held.__enter__()
                    self._held.append(held)

    def __exit__(self, *exception: Any) -> None:
        accumulation = self._state.accumulation
        if self._rates and exception[0] is None:
            self._state.schedule_check.compare(self._rates, accumulation.num_steps)
        accumulation.inside = False
        accumulation.leave()
        while self._held:
            self._held.pop().__exit__(*exception)
