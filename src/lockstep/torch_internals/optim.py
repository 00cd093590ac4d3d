"""Optimizers and schedulers."""

from __future__ import annotations

from typing import Any


def has_scheduler(optimizer: Any) -> bool:
    """Whether a scheduler was made for an optimizer.

    Needs the mark ``_wrapped_by_lr_sched`` that a scheduler leaves on the optimizer's ``step``; 2.9 to 2.13. Without
    it: nobody is warned of a scheduler that was not prepared.
    """
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def count_steps(scheduler: Any, steps: int) -> None:
    """Have a scheduler count steps that it does not make, as Accelerate does inside an accumulation window.

    Needs ``LRScheduler._step_count``; 2.9 to 2.13, and not every scheduler of others has it. Without it: nothing; only
    a check of the order of first steps reads it.
    """
    if hasattr(scheduler, "_step_count"):
        scheduler._step_count += steps
