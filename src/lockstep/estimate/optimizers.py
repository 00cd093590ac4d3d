"""What an optimizer takes: found by running it on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from lockstep.errors import ConfigError, first_line
from lockstep.estimate.memory_tracker import MemoryTracker
from lockstep.torch_internals import fake

Make = Callable[[list[nn.Parameter]], optim.Optimizer]

NAMED: dict[str, Callable[..., optim.Optimizer]] = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rmsprop": optim.RMSprop,
    "rprop": optim.Rprop,
}
"""Optimizers by name, with their defaults; "momentum" is SGD with it."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an optimizer takes, in bytes."""

    state: int
    """What it keeps from its first step on."""
    step: int
    """What a later step needs in between."""


def maker(optimizer: Any, device: str = "cpu") -> Make:
    """From a name, or a function that makes an optimizer."""
    if isinstance(optimizer, str) and optimizer.lower() in NAMED:
        named = NAMED[optimizer.lower()]
        # There torch handles all tensors at once unless told otherwise, and needs more room for it.
        return partial(named, foreach=True) if device == "cuda" else named
    if isinstance(optimizer, str) or not callable(optimizer) or isinstance(optimizer, optim.Optimizer):
        raise ConfigError(
            f"optimizer={optimizer!r} is not known. Allowed: {', '.join(map(repr, NAMED))}, or a function that takes "
            "the parameters and gives an optimizer."
        )
    return optimizer


def cost(parameters: Iterable[Tensor], make: Make) -> Cost:
    """Two steps of the optimizer on the meta device, where nothing has data: the first makes the state."""
    # Not as stand-ins: an optimizer reads the number of steps, so that one tensor must have data.
    with fake.real_tensors():
        bare = [nn.Parameter(torch.empty(held.shape, dtype=held.dtype, device="meta")) for held in parameters]
        for parameter in bare:
            parameter.grad = torch.empty_like(parameter)
        return _try(bare, make)


def _try(bare: list[nn.Parameter], make: Make) -> Cost:
    try:
        optimizer = make(bare)
        optimizer.step()
        ledger = MemoryTracker()
        ledger.enter_all(
            (leaf for leaf in fake.leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)), "optimizer"
        )
        state = ledger.total
        ledger.enter_all((tensor for held in bare for tensor in (held, held.grad) if tensor is not None), "weights")
        before = ledger.total
        with ledger:
            optimizer.step()
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        name = getattr(make, "__name__", None) or type(make).__name__
        raise ConfigError(
            f"The optimizer {name} cannot be tried without data: {first_line(error)}. Choose one of "
            f"{', '.join(NAMED)}: one that keeps as much per weight gives the same forecast."
        ) from error
    return Cost(state=state, step=ledger.peak - before)
