"""What an accelerator has to do with memory, each in one line or little more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from lockstep.config.sizes import check_size
from lockstep.process_group.group import Group


class MemoryMethods:
    """Letting go of what was prepared in an attempt that failed; micro-batches that fit."""

    _group: Group
    _strategy: Any
    _models: list[nn.Module]
    _prepared: tuple[list[Any], ...]
    _watch_only: Callable[[list[nn.Module]], None]
    _accumulation: Any
    _current_batch: Any
    _scaler: Any
    _watch: Any
    _current_round: Callable[[], Any]
    _record: Any
    _on_update: Callable[[], None] | None = None
    _given_up: Iterable[nn.Module] = ()
    """Models of attempts that failed and that somebody still refers to."""

    _microbatch_size: int | None = None

    @property
    def microbatch_size(self) -> int | None:
        """The most samples that ``auto_microbatch`` computes at once; None while every batch has fitted whole."""
        return self._microbatch_size

    @microbatch_size.setter
    def microbatch_size(self, value: int | None) -> None:
        self._microbatch_size = None if value is None else check_size(value, "microbatch_size")

    def auto_microbatch(
        self,
        batch: Any,
        compute_loss: Callable[[Any], Tensor],
        *,
        num_items: Callable[[Any], Any] | None = None,
        split: Callable[[Any, slice], Any] | None = None,
    ) -> Tensor:
        """Called on: all ranks. Forward and backward of one batch, in smaller parts on all ranks when memory runs out.

        Gradients are averaged once, after the last part, and are those of the whole batch. Returns its loss.

        Args:
            batch: Tensors, or tuples, lists, mappings and dataclasses of them; split along the first dimension.
            compute_loss: Gets a part of the batch, runs the model, returns the mean loss over the part's samples. It is
                called again for samples whose part did not fit, and does nothing with other ranks.
            num_items: A function of a part that counts what the loss is a mean of, where that is not samples.
            split: A function of the batch and a slice of its rows, for batches of another form.
        """
        from lockstep.memory.microbatch import train_on  # loaded where it is used, as few scripts do

        return train_on(self, batch, compute_loss, num_items, split)  # type: ignore[arg-type]

    def _scaled_up(self, loss: Tensor) -> Tensor:
        """The loss with fp16's scale, where there is one."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _watched_part(self, loss: Tensor, rows: slice, of: int) -> Tensor:
        """The loss of some rows of a batch as ``nan_policy`` wants it for the backward."""
        if self._watch is None:
            return loss
        now = self._current_round()
        # Rows are samples only where the batch is the loader's.
        return self._watch.loss(loss, replace(now, ids=now.ids[rows]) if now and len(now.ids) == of else None)

    def _mark_prepared(self) -> tuple[list[Any], ...]:
        """What is prepared so far, and the loaders that are being iterated."""
        return tuple(list(kept) for kept in (*self._prepared, self._current_batch.live))

    def _forget_since(self, mark: tuple[list[Any], ...]) -> None:
        """Let go of what was prepared since then."""
        dropped: list[Any] = []
        for kept, before in zip((*self._prepared, self._current_batch.live), mark, strict=True):
            known = {id(item) for item in before}
            dropped += [item for item in kept if id(item) not in known]
            kept[:] = [item for item in kept if id(item) in known]
        self._given_up = WeakSet(item for item in (*self._given_up, *dropped) if isinstance(item, nn.Module))
        self._watch_only(self._prepared[0])
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
