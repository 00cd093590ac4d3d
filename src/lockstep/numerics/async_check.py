"""Numbers of an accelerator, looked at one step late, so that nothing waits for the device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Bad(NamedTuple):
    """A number that was not finite."""

    what: str
    value: float
    samples: Any
    forwards: Any


class _Waiting(NamedTuple):
    done: Callable[[], bool]
    host: Tensor
    what: str
    samples: Any
    forwards: Any


class AsyncCheck:
    """Copies single numbers to the host behind the device's back, and looks at those that have arrived."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: deque[_Waiting] = deque()

    def put(self, what: str, value: Tensor, samples: Any, forwards: Any) -> None:
        """Have a number on its way; what belongs to it is given back if it is bad."""
        pinned = self._device.type != "cpu"
        host = torch.empty((), dtype=torch.float32, pin_memory=pinned)
        number = value.detach()
        host.copy_(number.reshape(()) if number.numel() == 1 else number.sum(), non_blocking=True)
        self._waiting.append(_Waiting(self._arrival(), host, what, samples, forwards))

    def _arrival(self) -> Callable[[], bool]:
        if self._device.type == "cpu":
            return lambda: True  # it is there
        event = torch.Event(self._device)
        event.record()
        return event.query

    def ready(self) -> Iterator[Bad]:
        """The bad ones among those that have arrived; none of them is given twice."""
        while self._waiting and self._waiting[0].done():
            one = self._waiting.popleft()
            value = one.host.item()
            if not math.isfinite(value):
                yield Bad(one.what, value, one.samples, one.forwards)
