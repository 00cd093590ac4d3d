"""Getting the user's model out of what was put around it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from lockstep.offload.offloaded_state import is_offloaded
from lockstep.precision import mixed
from lockstep.strategies.unwrap import inner_model, replica_module
from lockstep.torch_internals.compiler import original_of, uncompile


class _Unwraps(Protocol):
    def unwrap(self, model: nn.Module) -> nn.Module: ...


class _Peel:
    """Takes off whatever torch has put around a model, without knowing how it got there."""

    def __init__(self, recursive: bool) -> None:
        self._recursive = recursive

    def unwrap(self, model: nn.Module) -> nn.Module:
        model = inner_model(model)
        if self._recursive:
            for name, child in model.named_children():
                setattr(model, name, self.unwrap(child))
        return model


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The user's model, out of DDP or DataParallel; with ``recursive``, its parts out of theirs too."""
    return unwrap(model, _Peel(recursive), keep_fp32_wrapper, keep_torch_compile)


def unwrap(model: nn.Module, strategy: _Unwraps, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> nn.Module:
    """The user's model; its fp32 outputs and its compilation stay unless they are not to be kept."""
    compiled = original_of(model)
    outer = model if compiled is None else compiled
    inner = strategy.unwrap(outer)
    if replica_module(inner) is not inner:  # of the script's own
        inner = inner_model(inner)
    if not keep_fp32_wrapper:
        mixed.restore_forward(inner)
    if not keep_torch_compile:
        uncompile(inner)
    if compiled is not None and keep_torch_compile:
        return model if inner is outer else torch.compile(inner)  # type: ignore[return-value]
    return inner


def spans_devices(model: nn.Module) -> bool:
    """Whether a part of the model was loaded with a device map of more than one device, or is offloaded."""
    maps = (getattr(part, "hf_device_map", {}) for part in model.modules())
    return any(len(set(places.values())) > 1 for places in maps) or is_offloaded(model)
