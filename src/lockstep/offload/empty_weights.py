"""Building a model without memory for its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from lockstep.config import env


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Models that are built inside have their parameters on the meta device: they take no memory and no time.

    Args:
        include_buffers: Whether buffers have no values either. They are small and computed, not loaded, so they keep
            their values by default (or as ``ACCELERATE_INIT_INCLUDE_BUFFERS`` says).
    """
    return init_on_device(torch.device("meta"), include_buffers)


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Models that are built inside have their parameters on this device; what is tied inside stays tied.

    Args:
        device: Where to.
        include_buffers: Whether all other tensors that are made inside are there as well.
    """
    if _asked_for(include_buffers):
        with torch.device(device):
            yield
        return
    place = torch.empty(0, device=device).device

    def move(module: nn.Module, name: str, value: Any) -> Any:
        if value is None or is_lazy(value) or value.device == place:  # there already, and perhaps tied
            return None
        plain = value.detach()
        plain = torch.empty_like(plain, device=place) if plain.is_meta else plain.to(place)
        moved = plain.as_subclass(type(value)).requires_grad_(value.requires_grad)
        moved.__dict__.update(value.__dict__)
        return moved

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


def _asked_for(include_buffers: bool | None) -> bool:
    if include_buffers is not None:
        return include_buffers
    found = env.lookup("init_include_buffers", env.snapshot())
    return found is not None and env.parse_flag(found[1], found[0])
