"""Local SGD: each rank steps on its own gradients, and every so many steps the ranks average their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from types import TracebackType

_CHUNK = 256 << 20
"""Bytes of weights that are averaged in one collective, so that no second copy of a large model is needed."""


class LocalSGD:
    """A region in which gradients stay on their rank, and weights are averaged every ``local_sgd_steps`` steps.

    ::

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                    local_sgd.step()

    Called on: all ranks, as are ``step`` and the region's end, which averages once more. Every rank makes the same
    number of steps. With one process, or with ``enabled=False``, nothing changes.

    Args:
        accelerator: The one that has prepared the model.
        model: A prepared model.
        local_sgd_steps: How many calls of ``step`` there are between two averages.
        enabled: Whether anything is done at all.
    """

    def __init__(self, accelerator: Any, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if isinstance(local_sgd_steps, bool) or not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            raise ConfigError(f"local_sgd_steps={local_sgd_steps!r} must be a whole number, 1 or more.")
        self.enabled = bool(enabled) and accelerator.num_processes > 1
        self.num_steps = 0
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self._held: AbstractContextManager[None] | None = None
        if self.enabled and not any(model is prepared for prepared in accelerator._models):
            raise UsageError(
                "LocalSGD was given a model that this accelerator has not prepared. Pass what prepare() gave back."
            )

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._held = self.accelerator.no_sync(self.model)
            self._held.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        held.__exit__(kind, error, traceback)
        if error is None:  # else other ranks may never come to the average
            self._average()
            # The weights are the same again: from here on ranks compare them as before.
            self.accelerator._state.strategy.restart()

    def step(self) -> None:
        """Called on: all ranks, once per batch. Average the weights when it is time to."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        """Called on: all ranks. Give every rank the mean of all ranks' weights."""
        for chunk in _chunks(self.model):
            means = self.accelerator.reduce([parameter.detach() for parameter in chunk], reduction="mean")
            with torch.no_grad():
                for parameter, mean in zip(chunk, means, strict=True):
                    parameter.copy_(mean)


def _chunks(model: nn.Module) -> Iterator[list[Tensor]]:
    """The weights that training changes: what is frozen is the same on all ranks as it is."""
    chunk: list[Tensor] = []
    size = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if chunk and size + parameter.nbytes > _CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(parameter)
        size += parameter.nbytes
    if chunk:
        yield chunk
