"""Gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def clip_norm(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    *,
    grad_norm: Callable[[Sequence[Tensor], float], Tensor],
    due: bool,
    scale: float,
    sparing: bool = False,
) -> Tensor:
    """Clip the norm of the gradients, which ``grad_norm`` computes, and give it as it was.

    While an update is not ``due`` the gradients are partial and stay as they are; ``scale`` is the loss scale that is
    still in them. ``sparing`` leaves them as they are if the norm is no number: dividing by it would make all of them
    so. It waits for the norm.
    """
    norm = grad_norm(parameters, norm_type)
    if not due:
        return norm / scale
    if not sparing or math.isfinite(norm.item()):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
