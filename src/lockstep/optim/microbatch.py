"""One micro-batch of an accumulation window: whether its backward averages gradients or holds them back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lockstep.errors import UsageError
from lockstep.optim.accumulation import Accumulation
from lockstep.optim.unprepared_schedule import ScheduleCheck
from lockstep.strategies.choose import Strategy


class MicroBatch(AbstractContextManager[None]):
    """The region of ``accumulate``; a class, because entering a generator costs twice as much."""

    __slots__ = ("_accumulation", "_check", "_held", "_models", "_rates", "_strategy")

    def __init__(
        self, strategy: Strategy, accumulation: Accumulation, models: tuple[nn.Module, ...], check: ScheduleCheck
    ) -> None:
        self._strategy = strategy
        self._accumulation = accumulation
        self._models = models
        self._check = check
        self._rates: list[Any] = []
        self._held: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        accumulation = self._accumulation
        if accumulation.inside:
            raise UsageError("accelerator.accumulate() is open already. Pass several models to one: accumulate(a, b).")
        sync = accumulation.advance()
        accumulation.inside = True
        if not sync:
            self._rates = self._check.rates()
        if not sync and not accumulation.sync_each_batch:
            for model in self._models:
                held = self._strategy.no_sync(model)
                if held is not None:
                    held.__enter__()
                    self._held.append(held)

    def __exit__(self, *exception: Any) -> None:
        if self._rates and exception[0] is None:
            self._check.compare(self._rates, self._accumulation.num_steps)
        self._accumulation.inside = False
        self._accumulation.leave()
        while self._held:
            self._held.pop().__exit__(*exception)
