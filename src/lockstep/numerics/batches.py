"""Which batch a forward belongs to."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn


class Batches:
    """Counts the forwards of a model.

    A batch is one forward of the whole model, from 0. Once it has been trained, forwards in evaluation do not count, so
    that a number means the same batch however often it is evaluated in between; those before the first training forward
    are forgotten with it. A script that never trains counts every forward. A forward that raised does not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._depth = 0
        self._finished = 0
        self._trained = False
        self.current = 0
        """The batch that is being worked on, its backward and update included; in evaluation, the one before it."""
        self.counts = True
        """Whether the forward under way is one of the batches."""
        self.serial = 0
        """Forwards begun, of all kinds."""

    def begin(self) -> bool:
        """A forward of the model begins; whether it is an outermost one."""
        if self._depth and _running(self._model) <= 1:
            self._depth = 0  # the one before was broken off by something that torch tells no hook of, such as Ctrl-C
        self._depth += 1
        if self._depth > 1:
            return False
        training = self._model.training and torch.is_grad_enabled()
        if training and not self._trained:
            self._trained, self._finished = True, 0
        self.counts = training or not self._trained
        self.current = self._finished if self.counts else max(0, self._finished - 1)
        self.serial += 1
        return True

    def end(self, output: Any) -> bool:
        """A forward of the model has ended, in good order or not; whether that completes a batch."""
        self._depth = max(0, self._depth - 1)
        if self._depth or not self.counts or (output is None and sys.exc_info()[0] is not None):
            return False
        self._finished += 1
        return True

    @property
    def finished(self) -> int:
        """Batches that are complete."""
        return self._finished


def _running(model: nn.Module) -> int:
    """How many calls of the model are on the stack."""
    found, frame = 0, sys._getframe()
    place: FrameType | None = frame
    while place is not None:
        if place.f_code.co_name == "_call_impl" and place.f_locals.get("self") is model:
            found += 1
        place = place.f_back
    return found
