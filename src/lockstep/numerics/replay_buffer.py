"""Remembering what the latest forwards were called with, so that one of them can be run again."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.numerics.unwrap import idle

_generator = torch.default_generator


class Forward(NamedTuple):
    """What one forward of a model was called with."""

    model: nn.Module
    args: Any
    kwargs: Any
    state: Tensor
    """Of torch's generator on the CPU, before it."""
    device_state: Tensor | None
    """Of the accelerator's generator."""


class ReplayBuffer:
    """Remembers what the latest forwards were called with. A hook; copies and pickles of the model get an idle one."""

    __slots__ = ("_device", "_latest")

    def __init__(self, latest: deque[Forward], device: torch.device) -> None:
        self._latest = latest
        self._device = None if device.type == "cpu" else device

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """As a forward pre-hook is called."""
        if torch.is_grad_enabled():
            device = None if self._device is None else states_of(self._device).get_rng_state(self._device)
            # As Forward._make, which costs twice as much.
            self._latest.append(tuple.__new__(Forward, (model, args, kwargs, _generator.get_state(), device)))

    def __reduce__(self) -> tuple[Any, ...]:
        return idle()


def states_of(device: torch.device) -> Any:
    """Torch's module for a kind of device, which reads and sets the state of its generator."""
    return getattr(torch, device.type)
