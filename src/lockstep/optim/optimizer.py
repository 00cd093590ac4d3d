"""A prepared optimizer: steps only when an update is due, through the loss scaler where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.optim.accumulation import Accumulation
from lockstep.optim.monitor import TrainingMonitor
from lockstep.precision.scaler import LossScaler


class PreparedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, in step with gradient accumulation.

    Inside an accumulation window ``step`` and ``zero_grad`` do nothing until the micro-batch that completes it.
    Everything else goes to the wrapped optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        accumulation: Accumulation,
        scaler: LossScaler | None,
        announce: Callable[[PreparedOptimizer], None] | None = None,
        gate: TrainingMonitor | None = None,
        stepped: Callable[[PreparedOptimizer], None] | None = None,
        drop_held: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        # The base class is for isinstance only: its constructor would start a second optimizer.
        self.optimizer = optimizer
        self.step_was_skipped = False
        """Whether the last update was dropped: because of an fp16 overflow, or by ``nan_policy="skip"``."""
        self._accumulation = accumulation
        self._scaler = scaler
        self._announce = announce
        self._gate = gate
        self._stepped = stepped
        self._drop_held = drop_held
        """Drops gradients that were held back outside of ``grad``."""
        self._register()

    def _register(self) -> None:
        self._accumulation.optimizers.add(self.optimizer)
        if self._scaler is not None:
            self._scaler.watch(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, if an update is due."""
        if not self._accumulation.sync_gradients:
            return None
        if self._announce is not None:
            announce, self._announce = self._announce, None
            announce(self)
        gate = self._gate
        refused = gate is not None and gate.refuses(self.parameters())
        if self._scaler is None:
            self.step_was_skipped = refused
            if refused:
                return None
            loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            if self._stepped is not None:
                self._stepped(self)
            return loss
        self.step_was_skipped = not self._scaler.step(self.optimizer, closure)
        if gate is not None:
            gate.stepped(self.step_was_skipped)
        if self._stepped is not None and not self.step_was_skipped:
            self._stepped(self)
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, if an update was due."""
        if self._accumulation.sync_gradients:
            if self._drop_held is not None:
                self._drop_held(self.optimizer)
            self.optimizer.zero_grad(set_to_none)

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, as it would give it itself."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that the wrapped optimizer gave."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Tell an optimizer that keeps other weights for evaluation that training goes on; nothing for others."""
        getattr(self.optimizer, "train", lambda: None)()

    def eval(self) -> None:
        """Tell such an optimizer that evaluation begins; nothing for others."""
        getattr(self.optimizer, "eval", lambda: None)()

    def parameters(self) -> list[Tensor]:
        """All parameters, of all groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        # They lead to the accelerator, which a copy has no use for.
        return {**self.__dict__, "_announce": None, "_gate": None, "_stepped": None, "_drop_held": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

    def __repr__(self) -> str:
        return f"Prepared {self.optimizer!r}"
