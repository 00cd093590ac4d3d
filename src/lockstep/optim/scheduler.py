"""A prepared learning rate scheduler: follows the optimizer's updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from lockstep.config.choices import SchedulerUnit
from lockstep.optim.accumulation import Accumulation
from lockstep.optim.optimizer import PreparedOptimizer
from lockstep.torch_internals.optim import count_steps


class PreparedScheduler:
    """The user's scheduler, stepped only when its optimizer was.

    By default one call advances it once per process, as Accelerate does, so that a schedule written for one process
    has the same length in epochs on many. With ``scheduler_unit="update"`` one call is one step.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        accumulation: Accumulation,
        *,
        with_optimizer: bool,
        unit: SchedulerUnit,
        processes: int,
        announce: Callable[[PreparedScheduler], None],
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        """The optimizer that the schedule was made for; all of them while it has not been prepared."""
        for optimizer in optimizers:
            self.adopt(optimizer)
        self._accumulation = accumulation
        self._with_optimizer = with_optimizer
        self._announce: Callable[[PreparedScheduler], None] | None = announce
        self.steps_per_update = processes if unit is SchedulerUnit.PROCESS and with_optimizer else 1
        """By how much one call advances the schedule."""

    def adopt(self, optimizer: PreparedOptimizer) -> None:
        """Follow this optimizer alone, if the schedule was made for it."""
        if getattr(self.scheduler, "optimizer", None) in (optimizer, optimizer.optimizer):
            self.optimizers = [optimizer]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if the optimizer was stepped."""
        if self._announce is not None:
            announce, self._announce = self._announce, None
            announce(self)
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._accumulation.sync_gradients:
            if self._accumulation.adjust_scheduler:
                count_steps(self.scheduler, 1)
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        if type(self.scheduler) is LambdaLR and not args and not kwargs:
            self._jump(self.steps_per_update - 1)
            self.scheduler.step()
            return
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self.steps_per_update):
            # A cycle of fixed length refuses steps past its end.
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)

    def _jump(self, steps: int) -> None:
        """Pass over steps of a schedule that is a function of their number: only the last one has an effect."""
        self.scheduler.last_epoch += steps
        count_steps(self.scheduler, steps)

    def get_last_lr(self) -> Any:
        """The learning rates in force."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that the wrapped scheduler gave."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_announce": None}  # leads to the accelerator, which a copy has no use for

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"Prepared {self.scheduler!r}"
