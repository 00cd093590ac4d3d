"""An optimizer that was not prepared would step on every micro-batch, on gradients that are not averaged yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.errors import UsageError
from lockstep.optim.accumulation import Accumulation
from lockstep.optim.optimizer import PreparedOptimizer


def refuse_strangers(accumulation: Accumulation, prepared: Sequence[PreparedOptimizer]) -> Callable[[], None]:
    """Raise when an optimizer that was not prepared is stepped inside a window; gives what ends the watch."""
    watched = weakref.ref(accumulation)

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        window = watched()
        if window is None:
            handle.remove()
        elif window.inside and window.num_steps > 1 and all(item.optimizer is not optimizer for item in prepared):
            raise UsageError(
                f"A {type(optimizer).__name__} that was not prepared is stepped inside accelerator.accumulate(), whose "
                f"window is {window.num_steps}: it would step on every micro-batch, on incomplete gradients. "
                "Pass it to accelerator.prepare()."
            )

    handle = register_optimizer_step_pre_hook(check)
    return handle.remove
