"""What an accelerator has to do with memory, each in one line or little more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

from torch import nn


class MemoryTools:
    """Letting go of what was prepared in an attempt that failed; micro-batches that fit."""

    _prepared: tuple[list[Any], ...]
    _accumulation: Any
    _scaler: Any
    _record: Any
    _on_update: Callable[[], None] | None = None
    _given_up: Iterable[nn.Module] = ()
    """Models of attempts that failed and that somebody still refers to."""

    def _mark_prepared(self) -> tuple[list[Any], ...]:
        """What is prepared so far, and the loaders that are being iterated."""
        return tuple(list(kept) for kept in (*self._prepared, self._accumulation.loaders))

    def _forget_since(self, mark: tuple[list[Any], ...]) -> None:
        """Let go of what was prepared since then."""
        dropped: list[Any] = []
        for kept, before in zip((*self._prepared, self._accumulation.loaders), mark, strict=True):
            known = {id(item) for item in before}
            dropped += [item for item in kept if id(item) not in known]
            kept[:] = [item for item in kept if id(item) in known]
        self._given_up = WeakSet(item for item in (*self._given_up, *dropped) if isinstance(item, nn.Module))
        if self._scaler is not None:
            self._scaler.forget()
        self._record = None  # what is prepared next may be set up differently
        self._accumulation.reset()

    def _stretch_windows(self, factor: int) -> None:
        """Accumulate over so many times as many batches as was asked for."""
        self._accumulation.stretch(factor)

    def _at_each_update(self, callback: Callable[[], None] | None) -> None:
        """Have this called after each backward that completes an update."""
        self._on_update = callback
