"""One process: nothing to average."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


class Single:
    """The model as it is."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def fits(self, model: nn.Module) -> bool:
        """It is used as it is."""
        return True

    def replaced(self, model: nn.Module) -> None:
        """There is no wrapper."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None] | None:
        """None: there is no synchronisation to hold back."""
        return None

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def forced_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing to force."""
        return nullcontext()

    def join(self, joinables: Any, accumulation: Any, states: Any) -> AbstractContextManager[None]:
        """Nobody to wait for."""
        return nullcontext()

    def enter_backward(self, loss: Any, batch: int) -> int | None:
        """Nothing to wait for."""
        return -1

    def stepped(self, optimizer: Any) -> None:
        """Nobody to compare with."""

    def checksums(self) -> tuple[list[str], bytes]:
        """Nobody to compare with."""
        return [], b""

    def restart(self) -> None:
        """Nothing was counted."""

    def start_parts(self, models: Any) -> None:
        """Nothing to do with others."""

    def average(self, models: Any) -> None:
        """They are what they are."""

    def note_forwards(self, model: nn.Module, note: Any) -> None:
        """A hook on the model does."""

    def enable_recovery(self) -> None:
        """Nobody else can fail."""

    def reattach(self, model: nn.Module) -> None:
        """Nothing to attach."""

    def detach(self, model: nn.Module) -> None:
        """Nothing to let go of."""
