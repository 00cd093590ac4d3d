"""An optimizer that was not prepared would step on every micro-batch, on gradients that are not averaged yet."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.errors import UsageError
from lockstep.optim.accumulation import Accumulation

Parameters = Callable[[], Iterable[Tensor]]


def refuse_strangers(accumulation: Accumulation, trained: Parameters) -> None:
    """Raise from now on when an optimizer that was not prepared is stepped amid a window, on what is ``trained`` there.

    Others are no strangers: they train what belongs to nobody else (an inner loop, a perturbation of the inputs), or
    are stepped by a prepared one, or by the script where an update is due.
    """
    watched = _watched()
    if accumulation not in watched:
        watched[accumulation] = weakref.WeakMethod(trained)


@functools.cache
def _watched() -> weakref.WeakKeyDictionary[Accumulation, weakref.WeakMethod[Parameters]]:
    """The accumulations to ask. One hook for all of them: torch walks over its hooks, so none may remove itself."""
    accumulations: weakref.WeakKeyDictionary[Accumulation, weakref.WeakMethod[Parameters]] = weakref.WeakKeyDictionary()

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for window, reference in list(accumulations.items()):
            if not window.inside or window.num_steps == 1 or window.sync_gradients or optimizer in window.optimizers:
                continue
            trained = reference()
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if trained is not None and any(id(parameter) in own for parameter in trained()):
                raise UsageError(
                    f"A {type(optimizer).__name__} that was not prepared is stepped inside accelerator.accumulate(), "
                    f"whose window is {window.num_steps}: it would step on every micro-batch, on gradients that are "
                    "not complete. Pass it to accelerator.prepare(), or step it only if accelerator.sync_gradients."
                )

    register_optimizer_step_pre_hook(check)
    return accumulations
