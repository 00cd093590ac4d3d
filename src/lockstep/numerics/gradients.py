"""Beyond the forward: the gradients of a backward, and the parameters after an optimizer's step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lockstep.numerics import stats
from lockstep.numerics.stats import Numbers
from lockstep.numerics.tensor_reader import FrameRow, Leaf, TensorReader, leaves_of
from lockstep.numerics.unwrap import idle
from lockstep.torch_internals.module import parameters_of

Tell = Callable[[str, str, int, list[FrameRow]], None]
"""Takes a module's name, its kind, which call of it in the batch, and the rows."""


class Gradients:
    """Looks at the gradient of each module's output, and at that of each parameter, as a backward makes them."""

    def __init__(self, reader: TensorReader, on_found: Tell) -> None:
        self.reader = reader
        self.on_found = on_found
        """Takes what was read."""
        self.on = True
        """Whether to look."""
        self._watched: dict[int, weakref.ref[Tensor]] = {}
        self._handles: list[RemovableHandle] = []

    def watch_parameters(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Look at the parameters' gradients from now on."""
        for name, module in modules:
            for key, parameter in parameters_of(module).items():
                if parameter is not None and parameter.requires_grad:
                    enable_detector = _ParameterHook(self, name, type(module).__name__, key)
                    self._handles.append(parameter.register_hook(enable_detector))

    def watch_outputs(self, name: str, kind: str, call: int, outputs: Any) -> None:
        """Look at the gradients of what a module gave; what an inner module gave already is looked at there."""
        if isinstance(outputs, Tensor):
            self._watch(name, kind, call, "grad_output[0]", outputs)
            return
        for place, value in leaves_of("grad_output", outputs):
            if isinstance(value, Tensor):
                self._watch(name, kind, call, place, value)

    def _watch(self, name: str, kind: str, call: int, label: str, value: Tensor) -> None:
        if not value.requires_grad or value.is_leaf:
            return
        known = self._watched.get(id(value))
        if known is None or known() is not value:
            self._watched[id(value)] = weakref.ref(value)
            value.register_hook(_OutputHook(self, name, kind, call, label))

    def forget(self) -> None:
        """Forget the outputs of the batch before; their hooks go with them."""
        self._watched.clear()

    def remove(self) -> None:
        """Look no more."""
        self.on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _ParameterHook:
    """A hook of a parameter, whose gradient is read in full only when it is not finite, or is to be recorded.

    Copies and pickles of the model get one that does nothing.
    """

    __slots__ = ("_gradients", "_key", "_kind", "_name")

    def __init__(self, gradients: Gradients, name: str, kind: str, key: str) -> None:
        self._gradients, self._name, self._kind, self._key = gradients, name, kind, key

    def __call__(self, gradient: Tensor) -> None:
        gradients = self._gradients
        if gradients.on and (gradients.reader.thorough or not stats.sum_is_finite(gradient)):
            gradients.on_found(self._name, self._kind, 0, [gradients.reader.gradient(f"{self._key}.grad", gradient)])

    def __reduce__(self) -> tuple[Any, ...]:
        return idle()


class _OutputHook:
    """A hook of an output; a class, so that no function is made for each of them."""

    __slots__ = ("_call", "_gradients", "_kind", "_label", "_name")

    def __init__(self, gradients: Gradients, name: str, kind: str, call: int, label: str) -> None:
        self._gradients, self._name, self._kind, self._call, self._label = gradients, name, kind, call, label

    def __call__(self, gradient: Tensor) -> None:
        gradients = self._gradients
        if gradients.on:
            gradients.on_found(self._name, self._kind, self._call, [gradients.reader.gradient(self._label, gradient)])


class Updates:
    """Looks at a model's parameters after each step of an optimizer that holds any of them."""

    def __init__(
        self, reader: TensorReader, model: nn.Module, on_found: Callable[[str, str, list[FrameRow]], None]
    ) -> None:
        self._reader = reader
        self._on_found = on_found
        self._places = {
            id(parameter): (name, key, parameter)
            for name, module in model.named_modules()
            for key, parameter in parameters_of(module).items()
            if parameter is not None
        }
        self._handle = register_optimizer_step_post_hook(self._after)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                place = self._places.get(id(parameter))
                if place is None or place[2] is not parameter:
                    continue
                row = self._reader.weight(place[1], parameter)
                if isinstance(row.numbers, Numbers) and row.numbers.bad:
                    rows = [row, *self._reader.read(_around(optimizer, place[1], parameter))]
                    self._on_found(place[0], type(optimizer).__name__, rows)

    def remove(self) -> None:
        """Look no more."""
        self._handle.remove()


def _around(optimizer: torch.optim.Optimizer, key: str, parameter: Tensor) -> list[Leaf]:
    """What an update is made of: the gradient, and what the optimizer keeps for the parameter."""
    kept = optimizer.state.get(parameter, {})
    states = [(f"{key} {name}", value) for name, value in kept.items() if isinstance(value, Tensor)]
    return [(f"{key}.grad", parameter.grad), *states]
