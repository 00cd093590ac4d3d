"""Getting the user's model out of what was put around it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from lockstep.precision import mixed
from lockstep.strategies.compiling import uncompile


class _Unwraps(Protocol):
    def unwrap(self, model: nn.Module) -> nn.Module: ...


def unwrap(model: nn.Module, strategy: _Unwraps, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> nn.Module:
    """The user's model; its fp32 outputs and its compilation stay unless they are not to be kept."""
    compiled = getattr(model, "_orig_mod", None)
    outer = model if compiled is None else compiled
    inner = strategy.unwrap(outer)
    if not keep_fp32_wrapper:
        mixed.unwrap(inner)
    if not keep_torch_compile:
        uncompile(inner)
    if compiled is not None and keep_torch_compile:
        return model if inner is outer else torch.compile(inner)  # type: ignore[return-value]
    return inner


def spans_devices(model: nn.Module) -> bool:
    """Whether a part of the model was loaded with a device map of more than one device."""
    return any(len(set(getattr(part, "hf_device_map", {}).values())) > 1 for part in model.modules())
