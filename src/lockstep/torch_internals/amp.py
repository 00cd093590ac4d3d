"""torch.amp's loss scaler."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState


def has_scaled_gradients(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the gradients of an optimizer have the scale in them, so that ``unscale_`` may be called.

    Needs ``GradScaler._per_optimizer_states``; 2.9 to 2.13. Without it: calling ``unscale_`` and telling its refusal of
    a second call from its other errors by their words.
    """
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY)


def overflow_flags(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """After ``unscale_``: a flag for each device, not zero where a gradient is not finite; ``step`` goes by them.

    Needs ``GradScaler._per_optimizer_states``; 2.9 to 2.13. Without it: ranks that have parts of the gradients each
    could not drop an update together.
    """
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def forget_optimizers(scaler: GradScaler) -> None:
    """Forget all optimizers, which a scaler keeps by ids that others may get.

    Needs ``GradScaler._per_optimizer_states``; 2.9 to 2.13. Without it: an optimizer made after ``free_memory`` may
    count as unscaled already.
    """
    scaler._per_optimizer_states.clear()
