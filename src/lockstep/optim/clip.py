"""Gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def clip_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float, *, due: bool, scale: float, sparing: bool = False
) -> Tensor:
    """Clip the norm of the gradients and give it as it was.

    While an update is not ``due`` the gradients are partial and stay as they are; ``scale`` is the loss scale that is
    still in them. ``sparing`` leaves them as they are if the norm is no number: dividing by it would make all of them
    so. It waits for the norm.
    """
    parameters = list(parameters)
    if due and not sparing:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, norm_type=norm_type)
    if not due:
        return norm / scale
    if math.isfinite(norm.item()):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
