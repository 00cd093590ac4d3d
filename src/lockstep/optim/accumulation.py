"""Gradient accumulation: which micro-batch this is, and by what its loss is divided."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.comm import tensors
from lockstep.config.choices import TailDivisor
from lockstep.config.handlers import GradientAccumulationPlugin, check_steps
from lockstep.data.current_batch import CurrentBatch
from lockstep.data.iteration import Iteration
from lockstep.errors import ConfigError, UsageError
from lockstep.process_group.group import Group
from lockstep.torch_internals.tensor import scale_all


class Accumulation:
    """The open window of micro-batches.

    ``divisor`` is what a micro-batch's loss is divided by: the micro-batches that the window will have. At the end of
    a loader of unknown length the window can turn out shorter than was thought; its gradients are then scaled up once,
    after the backward that closes it.
    """

    def __init__(self, plugin: GradientAccumulationPlugin, batches: CurrentBatch | None = None) -> None:
        self.plugin = plugin
        self.batches = batches
        self.num_steps = plugin.num_steps or 1
        self._asked_steps = self.num_steps
        self.sync_with_dataloader = plugin.sync_with_dataloader
        self.sync_each_batch = plugin.sync_each_batch
        self.adjust_scheduler = plugin.adjust_scheduler
        self.exact_tail = plugin.tail_divisor is TailDivisor.PRESENT
        self.step = 0
        """Micro-batches since the last end of a loader."""
        self.sync_gradients = True
        """Whether this micro-batch completes an update."""
        self.divisor = self.num_steps
        self.inside = False
        """Whether an ``accumulate`` block is open."""
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """The users' optimizers that step in time with the windows."""
        self._filled = 0
        self.settled = True
        self._items: list[float] = []
        self._item_scale: float | None = None
        self._factor: float | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Accumulation:
        return self  # a part of the accelerator, of which there are no copies: a copied optimizer keeps its time

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "optimizers"}  # weak ones cannot go

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, optimizers=weakref.WeakSet())
        self.reset()  # nobody continues the window that was open

    def set_steps(self, steps: int) -> None:
        """Change the length of the windows to come."""
        self._asked_steps = check_steps(steps, "gradient_accumulation_steps")
        self.stretch(1)

    def stretch(self, factor: int) -> None:
        """Make windows so many times as long as was asked for: for batches that are so many times smaller."""
        self.num_steps = self._asked_steps * factor
        if self._filled == 0 or not self.exact_tail:
            self.divisor = self.num_steps  # an open window keeps its own, and is settled when it closes

    def reset(self) -> None:
        """Forget the open window: its gradients are given up."""
        self.step = self._filled = 0
        self.sync_gradients = self.settled = True
        self.inside = False
        self.divisor = self.num_steps
        self._items, self._factor = [], None

    def state_dict(self) -> dict[str, Any]:
        """The window, as plain values: which micro-batch this is, and what its gradients are divided by."""
        open_ = not self.sync_gradients  # a block that completes an update may still be open, but its window is not
        return {
            "step": self.step,
            "filled": self._filled if open_ else 0,
            "divisor": self.divisor,
            "items": list(self._items) if open_ else [],
            "item_scale": self._item_scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the window that ``state_dict`` told of; its gradients are somebody else's business."""
        self.reset()
        self.step, self._filled, self._item_scale = state["step"], state["filled"], state["item_scale"]
        self._items = list(state["items"])
        if self._filled:
            self.divisor = state["divisor"]
            self.sync_gradients = False  # so that nobody clears the gradients before it is complete

    def advance(self) -> bool:
        """Enter the next micro-batch; whether it completes an update."""
        iteration = None if self.batches is None else self.batches.training
        at_end = self.sync_with_dataloader and iteration is not None and iteration.end_of_dataloader
        if self._filled == 0:
            self.divisor = self._window(iteration)
        self._filled += 1
        self.step = 0 if at_end else self.step + 1
        self.sync_gradients = sync = at_end or self.step % self.num_steps == 0
        self.settled = not (sync and self.exact_tail and self._filled != self.divisor)
        return sync

    def _window(self, iteration: Iteration | None) -> int:
        if self.num_steps == 1 or not self.exact_tail or not self.sync_with_dataloader or iteration is None:
            return self.num_steps
        remaining = iteration.remaining
        return self.num_steps if remaining is None else max(1, min(self.num_steps, remaining))

    def leave(self) -> None:
        """Leave the micro-batch; after one that completed an update, the next opens a new window."""
        if self.sync_gradients:
            self._filled = 0
            self._items, self._factor = [], None

    # --- plain means -------------------------------------------------------------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as it goes into backward."""
        if self._items:
            raise UsageError(
                "backward(loss) without num_items follows a backward with num_items in one accumulation window. "
                "Give num_items in all of them, or in none."
            )
        divisor = self.divisor if self.inside else self.num_steps
        if self.inside and self.settled and self._filled != divisor and self.sync_gradients and self.exact_tail:
            divisor = self._filled  # an earlier backward of this micro-batch has scaled the window up already
        return loss if divisor == 1 else loss / divisor

    def rescale_gradients(self, parameters: Iterable[Tensor]) -> None:
        """After the backward that closes a window: scale up gradients that were divided by too much."""
        if self.settled:
            return
        self.settled = True
        _scale(parameters, self.divisor / self._filled)

    # --- weighted means ----------------------------------------------------------------------------------------

    def weighted(self, group: Group, loss: Tensor, num_items: Any) -> Tensor:
        """Called on: all ranks. The loss, a mean over ``num_items`` items, as it goes into backward.

        Gradients are summed with weights; ``settle_items`` divides them by the items of all ranks once the window is
        complete. Weights are relative to a typical count, the same on all ranks, so that fp16 does not overflow.
        """
        count = _count(num_items)
        if self.num_steps > 1 and not self.inside:
            raise UsageError(
                "backward(num_items=…) with gradient accumulation belongs inside accelerator.accumulate(); so does "
                "every backward with reproducible=True."
            )
        if self._filled > 1 and not self._items:
            raise UsageError(
                "backward with num_items follows one without in the same accumulation window. "
                "Give num_items in all of them, or in none."
            )
        if self._item_scale is None:
            self._item_scale = float(tensors.reduce(group, torch.tensor(max(count, 1.0)), "mean"))
        place = self._filled if self.inside else 1
        if len(self._items) < place:
            self._items.append(count)
        elif self._items[-1] != count:
            raise UsageError(
                f"Two backwards of one micro-batch say num_items={self._items[-1]:g} and {count:g}. "
                "They share one denominator: add the losses, or give the same number."
            )
        weight = count / self._item_scale
        if self._factor is not None:
            weight *= self._factor  # gradients of this window are divided already
        return loss * weight

    def divide_by_items(self, group: Group, parameters: Iterable[Tensor]) -> None:
        """Called on: all ranks, after the backward that closes a window. Divide by the items of all ranks."""
        self.settled = True
        if self._factor is None and self._item_scale is not None:
            mean = float(tensors.reduce(group, torch.tensor(sum(self._items), dtype=torch.float64), "mean"))
            self._factor = self._item_scale / mean if mean else 1.0
            _scale(parameters, self._factor)
        if not self.inside:
            self._items, self._factor = [], None


def _count(num_items: Any) -> float:
    try:
        count = float(num_items)
    except (TypeError, ValueError):
        raise ConfigError(f"num_items={num_items!r} is not a number of tokens or samples.") from None
    if not 0 <= count < float("inf"):
        raise ConfigError(f"num_items={num_items!r} must be a number of at least 0.")
    return count


def _scale(parameters: Iterable[Tensor], factor: float) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        scale_all(gradients, factor)
