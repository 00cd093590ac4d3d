"""An optimizer that was not prepared would step on every micro-batch, on gradients that are not averaged yet."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.errors import UsageError
from lockstep.optim.accumulation import Accumulation


def refuse_strangers(accumulation: Accumulation) -> None:
    """Raise from now on when an optimizer that was not prepared is stepped inside a window."""
    _watched().add(accumulation)


@functools.cache
def _watched() -> weakref.WeakSet[Accumulation]:
    """The accumulations to ask. One hook for all of them: torch walks over its hooks, so none may remove itself."""
    accumulations: weakref.WeakSet[Accumulation] = weakref.WeakSet()

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for window in accumulations:
            if window.inside and window.num_steps > 1 and optimizer not in window.optimizers:
                raise UsageError(
                    f"A {type(optimizer).__name__} that was not prepared is stepped inside accelerator.accumulate(), "
                    f"whose window is {window.num_steps}: it would step on every micro-batch, on gradients that are "
                    "not complete. Pass it to accelerator.prepare()."
                )

    register_optimizer_step_pre_hook(check)
    return accumulations
