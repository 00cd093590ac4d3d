"""Dynamic loss scaling for fp16, on torch.amp's scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lockstep.config.handlers import GradScalerKwargs
from lockstep.torch_internals.amp import forget_optimizers, has_scaled_gradients, overflow_flags


class LossScaler:
    """Torch's scaler, with the bookkeeping that several optimizers need.

    Torch wants one ``update`` after all optimizers of an iteration have stepped: an earlier one forgets that another
    optimizer's gradients are unscaled already. So the update waits until every optimizer has stepped, or for the next
    backward.
    """

    def __init__(
        self, device_type: str, options: GradScalerKwargs, any_rank: Callable[[bool], bool] | None = None
    ) -> None:
        self._scaler = torch.amp.GradScaler(device_type, **options.to_kwargs())
        self._watched: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
        """Optimizer -> whether it really stepped. Weak: one that is made later may get the id of one that is gone."""
        self._stepped: set[int] = set()
        self._any_rank = any_rank
        """Whether any rank has found an overflow; None where all find the same."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LossScaler:
        return self  # there is one scale in force, and a copied optimizer's gradients have it, too

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return {"_scaler": self._scaler, "_any_rank": None}  # leads to the accelerator

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _watched=WeakKeyDictionary(), _stepped=set())

    @property
    def torch_scaler(self) -> torch.amp.GradScaler:
        """Torch's scaler, up to date."""
        self.flush()
        return self._scaler

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn from now on whether the optimizer really stepped."""
        if optimizer not in self._watched:
            self._watched[optimizer] = False
            optimizer.register_step_post_hook(lambda stepped, *_: self._watched.__setitem__(stepped, True))

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, scaled."""
        self.flush()
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the scale out of the optimizer's gradients, once per update."""
        if not self._scaler.is_enabled():
            return
        if has_scaled_gradients(self._scaler, optimizer):
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Update the parameters unless a gradient overflowed; whether they were."""
        if id(optimizer) in self._stepped:
            self.flush()
        self._watched[optimizer] = False
        if self._any_rank is not None:
            self.unscale(optimizer)
            found = overflow_flags(self._scaler, optimizer)
            overflowed = self._any_rank(any(bool(flag.item()) for flag in found))
            for flag in found:
                flag.fill_(float(overflowed))
        self._scaler.step(optimizer) if closure is None else self._scaler.step(optimizer, closure=closure)
        self._stepped.add(id(optimizer))
        if len(self._stepped) >= len(self._watched):
            self.flush()
        return self._watched[optimizer]

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
            forget_optimizers(self._scaler)
