"""Gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def clip_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float, *, due: bool, scale: float) -> Tensor:
    """Clip the norm of the gradients and give it as it was.

    While an update is not ``due`` the gradients are partial and stay as they are; ``scale`` is the loss scale that is
    still in them.
    """
    parameters = list(parameters)
    if due:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients, norm_type=norm_type) / scale
