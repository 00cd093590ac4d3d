"""Always on: is the loss a number, is the gradient; and what is done when it is not.

``warn`` looks at each loss, and at the gradient norm where clipping has computed it. ``stop`` and ``skip`` look at loss
and gradient before each update. Ranks need no collective to agree: a rank whose loss is bad makes its gradient NaN, and
the average that follows carries that to every rank, so that all of them see it at the same update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.config.choices import NanPolicy
from lockstep.errors import NumericsError
from lockstep.numerics.async_check import AsyncCheck
from lockstep.numerics.dtype_limits import SCALER_PATIENCE
from lockstep.numerics.replay_buffer import Forward, ReplayBuffer
from lockstep.optim.monitor import TrainingMonitor
from lockstep.strategies.unwrap import inner_model
from lockstep.torch_internals.compiler import is_compiled
from lockstep.torch_internals.tensor import sparse_values
from lockstep.training.state import TrainingState

if TYPE_CHECKING:
    from lockstep.numerics.reporting import NanReporter

Mark = tuple[Any, ...]
"""What a watch has seen of an update; opaque to others."""
_KEPT = 4
"""Forwards remembered where updates are looked at; else it is the last one, and one more where that is a step late."""
_LOSSES = 64
"""Losses of one update that are remembered."""


class NanMonitor(TrainingMonitor):
    """Watches the numbers of one training; reports are kept in ``folder``."""

    def __init__(self, policy: NanPolicy, state: TrainingState, folder: Path | None) -> None:
        self.policy = policy
        self._state, self._group, self._folder = state, state.group, folder
        self._scaled = state.scaler is not None
        """Whether fp16's loss scaler drops updates on purpose."""
        self._updating = policy in (NanPolicy.STOP, NanPolicy.SKIP)
        device = state.topology.device
        self._async_check = None if device.type == "cpu" else AsyncCheck(device)
        self._recent: deque[Forward] = deque(maxlen=_KEPT if self._updating else 1 if self._async_check is None else 2)
        self._losses: deque[tuple[Tensor, Any, list[Forward]]] = deque(maxlen=_LOSSES)
        """Where reading a loss would make the device wait: those of this update, read if its gradient is bad."""
        self._models: list[nn.Module] = []
        self._handles: list[tuple[nn.Module, Any]] = []
        self._bad_loss: tuple[str, Any, list[Forward]] | None = None
        self._norm: tuple[Tensor, frozenset[int]] | None = None
        self.pending = 0
        self._dropped = 0
        """Updates in a row that the loss scaler has dropped."""

    @property
    def spares(self) -> bool:
        """Where updates are looked at, and looking does not make the device wait."""
        return self._updating and self._async_check is None

    @property
    def guards(self) -> bool:
        """Whether updates are looked at, or dropped by fp16's loss scaler."""
        return self._updating or self._scaled

    @cached_property
    def _reporter(self) -> NanReporter:
        from lockstep.numerics.reporting import NanReporter  # loaded where it is used: most runs stay finite

        return NanReporter(self._state, self._folder, self._models)

    # --- what the accelerator calls ----------------------------------------------------------------------------

    def follow(self, model: nn.Module, *, trained: bool) -> None:
        """Remember what this model's forwards are called with; a compiled one is left as it was compiled."""
        if not trained:
            return
        inner = inner_model(model)
        self._models.append(inner)
        if not is_compiled(model):
            recall = ReplayBuffer(self._recent, self._group.device)
            handle = self._state.strategy.note_forwards(model, recall)
            if handle is None:
                handle = inner.register_forward_pre_hook(recall, with_kwargs=True)
            self._handles.append((inner, handle))

    def retain(self, models: Iterable[nn.Module]) -> None:
        """Forget all other models than these, and what any of them was called with."""
        kept = {id(inner_model(model)) for model in models}
        for inner, handle in self._handles:
            if id(inner) not in kept:
                handle.remove()
        self._handles[:] = [pair for pair in self._handles if id(pair[0]) in kept]
        self._models[:] = [model for model in self._models if id(model) in kept]
        self._recent.clear()
        self._bad_loss = self._norm = None
        self.pending = 0

    def loss(self, loss: Tensor, samples: Any = None) -> Tensor:
        """Look at a loss; the loss for backward, which is NaN in every part if the update is not to be made.

        ``samples`` are those it is of, where they are not the whole batch.
        """
        if self._async_check is not None:
            return self._unread(loss, samples)
        value = loss.item() if loss.numel() == 1 else loss.detach().sum().item()
        if math.isfinite(value):
            return loss
        self._bad_loss = self._bad_loss or (
            f"the loss is {value}", samples or self._state.current_batch.round, list(self._recent)[-1:]
        )  # fmt: skip
        self.pending = 0 if self._updating else self._state.updates + 1
        return loss * math.nan if self._updating else loss

    def mark(self) -> Mark:
        """What was seen so far of the update."""
        return self._bad_loss, self.pending, list(self._losses), list(self._recent)

    def forget_since(self, mark: Mark) -> None:
        """Forget what was seen since then: it is computed again, and counts only as it comes out then."""
        self._bad_loss, self.pending, losses, forwards = mark
        for kept, before in ((self._losses, losses), (self._recent, forwards)):
            kept.clear()
            kept.extend(before)

    def _unread(self, loss: Tensor, samples: Any) -> Tensor:
        """The same without reading it, where that would make the device wait."""
        if not self._updating:
            self._check_later("the loss", loss, samples)
            return loss
        value = loss.detach()
        self._losses.append((value, samples or self._state.current_batch.round, list(self._recent)[-1:]))
        return loss * (value * 0 + 1)  # 1, or NaN if the loss is not finite

    def _read_losses(self) -> None:
        """Find the first bad loss of the update among those that were not read."""
        for value, samples, forwards in self._losses:
            number = value.sum().item()
            if not math.isfinite(number):
                self._bad_loss = self._bad_loss or (f"the loss is {number}", samples, forwards)
        self._losses.clear()

    def report(self) -> None:
        """After the backward of a bad loss: tell of it. Not before, as running a batch again may change its inputs."""
        found, self._bad_loss = self._bad_loss, None
        if found is not None:
            self._reporter.warn(self.pending, *found)
        self.pending = 0

    def norm(self, norm: Tensor, parameters: Iterable[Tensor]) -> None:
        """Look at a gradient norm that clipping has computed for an update."""
        if self._updating:
            self._norm = (norm, frozenset(id(parameter) for parameter in parameters))
        elif self._scaled:
            return  # the scaler drops what overflows, and tells ``stepped``
        elif self._async_check is not None:
            self._check_later("the gradient norm", norm)
        elif not math.isfinite(norm.item()):
            self._reporter.warn(
                self._state.updates,
                f"the gradient norm is {norm.item()}",
                self._state.current_batch.round,
                list(self._recent),
            )

    def refuses(self, parameters: Sequence[Tensor]) -> bool:
        """Called on: all ranks. Whether the update of these parameters is to be dropped; raises where it is to stop."""
        if not self._updating:
            return False
        if self._scaled and self._bad_loss is None:
            return False  # the scaler sees the same gradients, and drops what overflows
        value = math.nan if self._scaled else self._gradient(parameters)
        found_here = not math.isfinite(value) or self._bad_loss is not None
        if not (found_here if self._scaled else self._state.strategy.any_rank(found_here)):
            self._losses.clear()
            return False
        self._read_losses()
        found, self._bad_loss = self._bad_loss, None
        # With a scaler the other ranks drop this update as they drop any overflow: there is nothing to put together.
        what, samples, forwards = found or ("", self._state.current_batch.round, list(self._recent))
        head = f"the gradient of update {self._state.updates} is {value if found_here else 'nan or inf elsewhere'}"
        head = what if self._scaled else head
        text, tells = self._reporter.update(what, samples, forwards, alone=self._scaled)
        if self.policy is NanPolicy.STOP:
            error = NumericsError(f"nan_policy='stop': {head}.\n{text}")
            cause = text.partition("\n")[0]
            if cause.startswith("rank "):  # it raises on all of them
                error.lead = f"Rank {cause.removeprefix('rank ')}; update {self._state.updates}, nan_policy='stop'."
            raise error
        if tells:
            everywhere = " on all ranks" if self._group.world_size > 1 else ""
            self._reporter.log(f"nan_policy='skip': {head}; the update is dropped{everywhere}.\n{text}")
        return True

    def stepped(self, dropped: bool) -> None:
        """An update in fp16 was made, or dropped by the loss scaler."""
        if dropped and self._losses:
            self._read_losses()
            if self._bad_loss is not None:
                self.refuses(())
        self._losses.clear()
        self._dropped = self._dropped + 1 if dropped else 0
        if self._dropped != SCALER_PATIENCE:
            return
        what = f"{SCALER_PATIENCE} updates in a row were dropped, the gradients overflow at any loss scale"
        text, tells = self._reporter.update(what, self._state.current_batch.round, list(self._recent), alone=True)
        if self.policy is NanPolicy.STOP:
            raise NumericsError(f"nan_policy='stop': {text}")
        if tells:
            self._reporter.log(text)

    # --- looking -----------------------------------------------------------------------------------------------

    def _gradient(self, parameters: Sequence[Tensor]) -> float:
        """The gradient norm that clipping has computed, or else a number that is finite if the gradients are."""
        norm, self._norm = self._norm, None
        if norm is not None and all(id(parameter) in norm[1] for parameter in parameters):
            return norm[0].item()
        return gradient_screen([parameter.grad for parameter in parameters if parameter.grad is not None])

    def _check_later(self, what: str, value: Tensor, samples: Any = None) -> None:
        if self._async_check is not None:
            for bad in self._async_check.ready():
                self._reporter.warn(
                    self._state.updates, f"{bad.what} was {bad.value} a step ago", bad.samples, bad.forwards
                )
            self._async_check.put(what, value, samples or self._state.current_batch.round, list(self._recent)[-1:])


def gradient_screen(gradients: Sequence[Tensor]) -> float:
    """A number that is finite if and only if all gradients are."""
    if not gradients:
        return 0.0
    if not gradients[0].is_cpu:
        return torch.nn.utils.get_total_norm(gradients).item()
    total = 0.0
    for gradient in gradients:
        total += (sparse_values(gradient) if gradient.is_sparse else gradient).sum().item()
    if math.isfinite(total) or any(not bool(torch.isfinite(gradient).all()) for gradient in gradients):
        return total
    return 0.0  # only the sum has overflowed
