"""A schedule that was not prepared moves on every micro-batch, also on those that complete no update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.optim.optimizer import PreparedOptimizer
from lockstep.optim.scheduler import PreparedScheduler
from lockstep.torch_internals.optim import has_scheduler


class ScheduleCheck:
    """Looks whether learning rates change in micro-batches that complete no update, and reports it once."""

    def __init__(self, optimizers: Sequence[PreparedOptimizer], schedulers: Sequence[PreparedScheduler]) -> None:
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._reported = False

    def rates(self) -> list[Any]:
        """Those of optimizers with a schedule that nobody has prepared."""
        if self._reported:
            return []
        followed = {id(optimizer) for scheduler in self._schedulers for optimizer in scheduler.optimizers}
        return [
            group["lr"]
            for optimizer in self._optimizers
            if id(optimizer) not in followed and _is_scheduled(optimizer)
            for group in optimizer.param_groups
            if isinstance(group.get("lr"), (int, float))  # a tensor changes in place, and reading it may wait
        ]

    def compare(self, before: list[Any], steps: int) -> None:
        """At the end of a micro-batch that completes no update, with the rates of its beginning."""
        if before == self.rates():
            return
        self._reported = True
        from lockstep.logging import get_notices  # loaded where it is used: there is seldom anything to log

        get_notices("lockstep.run").warning(
            "A learning rate scheduler that was not passed to prepare() was stepped in a micro-batch that completes no "
            f"update: inside accumulate() it moves {steps} times for each update, and the schedule ends too early. "
            "Pass it to prepare(), together with its optimizer, or step it only if accelerator.sync_gradients."
        )


def _is_scheduled(optimizer: PreparedOptimizer) -> bool:
    """Whether a scheduler was made for it."""
    return any(has_scheduler(item) for item in (optimizer, optimizer.optimizer))
