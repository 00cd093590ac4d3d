"""What looks at models and numbers during training, as the training calls it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn


class TrainingMonitor:
    """Looks at nothing; ``numerics`` has those that do. Every method is called by the training."""

    pending = 0
    """The update whose loss is bad and has yet to be reported; 0 when there is none."""

    @property
    def spares(self) -> bool:
        """Whether clipping is to leave gradients with a bad norm as they are, so that it can be seen which are bad."""
        return False

    @property
    def guards(self) -> bool:
        """Whether updates are looked at, or dropped by fp16's loss scaler."""
        return False

    def follow(self, model: nn.Module, *, trained: bool) -> None:
        """A model was prepared; ``trained`` is False in evaluation mode."""

    def retain(self, models: Iterable[nn.Module]) -> None:
        """Forget all other models than these: what they hold is to be freed."""

    def loss(self, loss: Tensor, samples: Any = None) -> Tensor:
        """The loss for backward; ``samples`` are those it is of, where they are not the whole batch."""
        return loss

    def mark(self) -> Any:
        """What was seen so far of the update."""

    def forget_since(self, mark: Any) -> None:
        """Forget what was seen since then: it is computed again."""

    def report(self) -> None:
        """After the backward of a bad loss."""

    def norm(self, norm: Tensor, parameters: Iterable[Tensor]) -> None:
        """Clipping has computed the norm of an update's gradients."""

    def refuses(self, parameters: Sequence[Tensor]) -> bool:
        """Called on: all ranks. Whether the update of these parameters is to be dropped."""
        return False

    def stepped(self, dropped: bool) -> None:
        """The loss scaler has made an update, or dropped it."""
