"""Which parameters a model's wrapper averages, and whether they are still the ones that are trained.

DDP decides once, when it is made. What is unfrozen or added later keeps a gradient of its own on each rank. What is
frozen or removed later is waited for in vain: none of the gradients are averaged, and the next forward raises.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_requires_grad = attrgetter("requires_grad")
_SHOWN = 3
"""Parameters that are named."""
_REMEDY = "Prepare the model again after such a change: model = accelerator.prepare(accelerator.unwrap_model(model))."


class TrainedParameters:
    """The parameters of one model as they were when it was wrapped."""

    def __init__(self, model: nn.Module, ignored: Collection[str] = (), *, waits: bool, learns: bool = False) -> None:
        self._ignored = frozenset(ignored)
        self._waits = waits
        """Whether a reduction needs a gradient of each of them."""
        self._learns = learns
        """Whether it finds out in its first backward of which: a static graph."""
        self._named = self._of(model)
        self._parameters = list(self._named.values())
        self._flags = self._awaited = [parameter.requires_grad for parameter in self._parameters]
        self._averaged = {id(item) for item in self._parameters if item.requires_grad}
        self._buffers = [name for name, _ in model.named_buffers()]
        self._registered = _registrations()[0]
        self._reported: set[str] = set()

    def _of(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: parameter for name, parameter in model.named_parameters() if name not in self._ignored}

    @property
    def may_differ(self) -> bool:
        """Whether a change may matter; costs some 0.05 us for each parameter.

        A model that is frozen as a whole gets no gradients: a GAN's discriminator, while its generator is trained.
        """
        flags = list(map(_requires_grad, self._parameters))
        if self._registered != _registrations()[0] or self._learns:
            return True
        return flags != self._flags and True in flags

    def fits(self, model: nn.Module) -> bool:
        """Whether the model has the same parameters, the same of them are trained, and no buffer came or went."""
        flags = [parameter.requires_grad for parameter in self._parameters]
        buffers = [name for name, _ in model.named_buffers()]
        return self._has_same(model) and flags == self._flags and buffers == self._buffers

    def _has_same(self, model: nn.Module) -> bool:
        now = self._of(model)
        return len(now) == len(self._parameters) and all(map(_is_same, now.values(), self._parameters))

    def averages(self, parameter: Tensor) -> bool:
        """Whether the gradient of this parameter is averaged."""
        return id(parameter) in self._averaged

    def find_local(self, model: nn.Module, has_gradient: Callable[[Tensor], bool]) -> list[str]:
        """Parameters that are trained, and whose gradients stay on this rank."""
        return [
            name
            for name, parameter in self._of(model).items()
            if parameter.requires_grad and not self.averages(parameter) and has_gradient(parameter)
        ]

    def find_missing(self, model: nn.Module, reached: Collection[int]) -> list[str]:
        """Parameters whose gradients the reduction of this backward waits for in vain.

        Empty where it does not wait: no hook of DDP is called when the backward reaches nothing that it averages, as
        when a GAN's discriminator is frozen while its generator is trained.
        """
        if self._learns:
            self._learns = False
            self._awaited = [id(parameter) in reached for parameter in self._parameters]
            return []
        awaited = [item for item, flag in zip(self._named.items(), self._awaited, strict=True) if flag]
        if not self._waits or not any(id(parameter) in reached for _, parameter in awaited):
            return []
        present = {id(parameter) for parameter in model.parameters()}
        return [
            name
            for name, parameter in awaited
            if id(parameter) not in reached and not (parameter.requires_grad and id(parameter) in present)
        ]

    def describe(self, model: nn.Module, loss: Any, elsewhere: Callable[[Tensor], bool]) -> str | None:
        """What this backward gets wrong because of a change, in words; None where it does not, or was reported.

        ``elsewhere``: whether another model, which has this parameter too, averages its gradient.
        """
        if self._has_same(model):
            self._registered = _registrations()[0]  # what was registered belongs to another model
            if not self.may_differ:
                return None
        reached = _reached(loss)
        missing = self.find_missing(model, reached)
        if missing:
            return self._once(
                f"{_name(missing)} of {type(model).__name__} {_was(missing)} frozen or removed after prepare(), and "
                "DistributedDataParallel still waits for the gradients. It does not average any gradients in this "
                f"backward, and the next forward raises. {_REMEDY} To freeze parameters now and then, use "
                "DistributedDataParallelKwargs(find_unused_parameters=True)."
            )
        return self.describe_local(model, lambda parameter: id(parameter) in reached and not elsewhere(parameter))

    def describe_local(self, model: nn.Module, has_gradient: Callable[[Tensor], bool]) -> str | None:
        """The same for gradients that stay on this rank."""
        local = self.find_local(model, has_gradient)
        if not local:
            return None
        return self._once(
            f"{_name(local)} of {type(model).__name__} {_was(local)} unfrozen or added after prepare(), so that the "
            f"gradients are not averaged: each rank trains these parameters on its own data alone. {_REMEDY}"
        )

    def _once(self, text: str) -> str | None:
        new = text not in self._reported
        self._reported.add(text)
        return text if new else None


def _reached(loss: Any) -> set[int]:
    """The ids of the tensors to which a backward of this loss gives gradients, as far as the graph shows them.

    A function of the user's, or activation checkpointing, may run a part of the model in its own backward.
    """
    first = loss.grad_fn if isinstance(loss, Tensor) else None
    nodes, seen, reached = deque([] if first is None else [first]), {first}, set()
    while nodes:
        node = nodes.popleft()
        if type(node).__name__ == "AccumulateGrad":
            reached.add(id(node.variable))  # type: ignore[attr-defined]
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return reached


@functools.cache
def _registrations() -> list[int]:
    """How many parameters and modules were registered anywhere so far: a walk over the model would cost more."""
    count = [0]

    def registered(*_: Any) -> None:
        count[0] += 1

    register_module_parameter_registration_hook(registered)
    register_module_module_registration_hook(registered)
    return count


def _is_same(one: Any, other: Any) -> bool:
    return one is other


def _name(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _was(names: list[str]) -> str:
    return "was" if len(names) == 1 else "were"
