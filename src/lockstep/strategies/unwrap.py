"""The user's model inside what strategies and torch put around it, and the names its weights have there."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lockstep.torch_internals.compiler import original_of

_PREFIX = "module."
"""What the names of weights begin with outside."""


def inner_model(model: nn.Module) -> nn.Module:
    """The model without DDP, DataParallel and ``torch.compile`` around it: names of weights have no prefix there."""
    while True:
        compiled = original_of(model)
        inner = compiled if compiled is not None else replica_module(model)
        if inner is model:
            return model
        model = inner


def replica_module(model: nn.Module) -> nn.Module:
    """The model without one DDP or DataParallel around it, the script's own included; compiled if it was."""
    return model.module if isinstance(model, (DataParallel, DistributedDataParallel)) else model


def strip_prefix(entries: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Weights under the model's own names, where a replica's were saved: Accelerate saves a DDP model under its own."""
    if not entries or not all(name.startswith(_PREFIX) for name in entries):
        return entries
    if any(name.startswith(_PREFIX) for name in model.state_dict()):
        return entries
    return {name.removeprefix(_PREFIX): entry for name, entry in entries.items()}
