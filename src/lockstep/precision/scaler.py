"""Dynamic loss scaling for fp16, on torch.amp's scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.config.handlers import GradScalerKwargs


class LossScaler:
    """Torch's scaler, with the bookkeeping that several optimizers need.

    Torch wants one ``update`` after all optimizers of an iteration have stepped: an earlier one forgets that another
    optimizer's gradients are unscaled already. So the update waits until every optimizer has stepped, or for the next
    backward.
    """

    def __init__(self, device_type: str, options: GradScalerKwargs) -> None:
        self._scaler = torch.amp.GradScaler(device_type, **options.to_kwargs())
        self._watched: dict[int, bool] = {}
        self._stepped: set[int] = set()

    @property
    def torch_scaler(self) -> torch.amp.GradScaler:
        """Torch's scaler, up to date."""
        self.flush()
        return self._scaler

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn from now on whether the optimizer really stepped."""
        key = id(optimizer)
        if key not in self._watched:
            self._watched[key] = False
            optimizer.register_step_post_hook(lambda *_: self._watched.__setitem__(key, True))

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, scaled."""
        self.flush()
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the scale out of the optimizer's gradients, once per update."""
        if not self._scaler.is_enabled():
            return
        state = self._scaler._per_optimizer_states[id(optimizer)]
        if state["stage"] is torch.amp.grad_scaler.OptState.READY:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Update the parameters unless a gradient overflowed; whether they were."""
        if id(optimizer) in self._stepped:
            self.flush()
        self._watched[id(optimizer)] = False
        self._scaler.step(optimizer) if closure is None else self._scaler.step(optimizer, closure=closure)
        self._stepped.add(id(optimizer))
        if len(self._stepped) >= len(self._watched):
            self.flush()
        return self._watched[id(optimizer)]

    def flush(self) -> None:
        """Let torch adjust the scale after the steps that were taken."""
        if self._stepped:
            self._stepped.clear()
            self._scaler.update()

    def current(self) -> float:
        """The scale in force."""
        return float(self._scaler.get_scale())

    def forget(self) -> None:
        """Forget the optimizers, when they are freed."""
        self.flush()
        self._watched.clear()
        if self._scaler.is_enabled():
            self._scaler._per_optimizer_states.clear()  # kept by id, which another optimizer may get
