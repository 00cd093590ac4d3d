"""Optimizers follow when a strategy puts other parameters in the place of a model's: by name, in any order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.strategies.base import Rows


class Rebinding:
    """Which parameter has taken the place of which, for optimizers that were made before, prepared before or not."""

    def __init__(self) -> None:
        self._newer: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        """id of a parameter that was replaced -> itself, and the one that is trained instead."""

    def add(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Note a model's parameters, by name, before and after they were replaced."""
        for name, old in before.items():
            new = after.get(name)
            if new is not None and new is not old:
                self._newer[id(old)] = weakref.ref(old), weakref.ref(new)

    def _latest(self, parameter: Tensor) -> Tensor:
        while True:
            old, new = self._newer.get(id(parameter), (None, None))
            if old is None or new is None or old() is not parameter or (following := new()) is None:
                return parameter
            parameter = following

    def rebind(self, optimizer: torch.optim.Optimizer, rows_of: Callable[[Tensor], Rows | None]) -> None:
        """Have an optimizer hold the parameters that are trained now, and of its state the rows that they have."""
        for group in optimizer.param_groups if self._newer else ():
            for place, old in enumerate(group["params"]):
                new = self._latest(old)
                if new is old:
                    continue
                group["params"][place] = new
                kept, rows = optimizer.state.pop(old, None), rows_of(new)
                if kept is not None:
                    optimizer.state[new] = {
                        name: rows.take(value)
                        if rows is not None and isinstance(value, Tensor) and value.shape == old.shape
                        else value
                        for name, value in kept.items()
                    }

    def check(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        """Raise for an optimizer that has no parameter of any model, where parameters were replaced."""
        if not self._newer:
            return
        trained = {id(parameter) for model in models for parameter in model.parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if held and not any(id(parameter) in trained for parameter in held):
            kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
            raise UsageError(
                f"This {kind} has no parameter of a prepared model, so its steps train nothing: the parameters were "
                "replaced when the model was prepared. Make the optimizer from the parameters of the model that is "
                "passed to prepare(), or of the one that it returns."
            )
