"""Torch's DistributedDataParallel, which says when it is called."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import parallel
from torch.utils.hooks import RemovableHandle

from lockstep.blackbox.box import NoBox
from lockstep.strategies.ddp.trained_parameters import TrainedParameters
from lockstep.torch_internals.ddp import around_pre_forward, reduce_as_torchs

Note = Callable[[nn.Module, Any, Any], None]
_OWN = ("reduction", "trained", "_notes", "_share_buffers")
BUFFER_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""The name that this version of torch has for sharing buffers."""


class Reduction:
    """Where one model stands between a forward and the optimizer step that follows."""

    __slots__ = ("box", "count", "expected", "held_back", "local", "owned", "replaced")

    def __init__(self, box: Callable[[], NoBox]) -> None:
        self.box = box
        """The rank's black box."""
        self.replaced = False
        """Whether the model was prepared again. Whoever still holds this wrapper can use it."""
        self.expected = False
        """Whether a forward has told torch to reduce gradients in the backward that reaches this model next."""
        self.count = 0
        """How often its gradients were reduced. Several optimizers may each make a step after one reduction."""
        self.local = False
        """Whether an optimizer has used gradients of this rank alone: the ranks' weights may differ from then on."""
        self.held_back = False
        """Whether the latest forward was one whose gradients stay on this rank."""
        self.owned = False
        """Whether a prepared optimizer updates it, so that its steps are known."""

    @property
    def is_replica(self) -> bool:
        """Whether its parameters must be the same on all ranks, as far as anybody knows."""
        return not (self.local if self.owned else self.held_back)


class DistributedDataParallel(parallel.DistributedDataParallel):
    """A model on each rank. It has the name that scripts and readers know.

    Torch's own hooks could say the same, but a module with a hook takes a longer way through every call: two of them
    cost 13 us of a step.
    """

    def __init__(self, model: nn.Module, reduction: Reduction, trained: TrainedParameters, **options: Any) -> None:
        super().__init__(model, **options)
        self.reduction = reduction
        self.trained = trained
        """The parameters whose gradients are reduced. Not in the state above, which may live longer than the model."""
        self._notes: OrderedDict[int, Note] = OrderedDict()
        self._share_buffers: Callable[[nn.Module], None] | None = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's."""
        if self._share_buffers is not None:
            self._share_buffers(self)
        graded = torch.is_grad_enabled()
        reduces = graded and self.require_backward_grad_sync
        if graded:
            self.reduction.held_back = not reduces
        if reduces:
            self.reduction.expected = True
        if torch.compiler.is_compiling():
            return super().forward(*inputs, **kwargs)
        if reduces:
            self.reduction.box().forward()
        if graded:
            for note in self._notes.values():
                note(self.module, inputs, kwargs)
        box = self.reduction.box()
        box.phase("forward", site=True)
        try:
            return super().forward(*inputs, **kwargs)
        finally:
            box.phase("")

    def share_buffers_with(self, share: Callable[[nn.Module], None]) -> None:
        """Have this called before each forward, in place of what torch does to share buffers."""
        self._share_buffers = share

    def note_forwards(self, note: Note) -> RemovableHandle:
        """Have the model and what it is called with told before each forward that is trained on."""
        handle = RemovableHandle(self._notes)
        self._notes[handle.id] = note
        return handle

    def barrier_at_next_forward(self, meet: Callable[[], None] | None) -> None:
        """Call this before and after what DDP does ahead of the next forward that is trained on; None: do not."""
        around_pre_forward(self, meet)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy is torch's own, nobody's replica, and a saved one can be loaded where Lockstep is not installed.
        shares = {BUFFER_OPTION: True, "broadcast_buffers": True} if self._share_buffers is not None else {}
        return reduce_as_torchs(self, _OWN, **shares)
