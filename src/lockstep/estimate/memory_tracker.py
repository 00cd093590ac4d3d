"""A ledger of tensor memory: how many bytes live from operation to operation, and what they are for.

It sees every tensor that an operation gives back, forward and backward, and is told when its storage is freed. So it
knows the peak over time, on any device, and for tensors that hold no data at all. What a kernel takes and gives back
inside one operation is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lockstep.torch_internals.fake import DispatchMode, leaves
from lockstep.torch_internals.tensor import sparse_indices, sparse_values, storage_key

TEMPORARY = "temporary"
"""What no one has claimed: results on their way from one operation to the next."""
ACTIVATIONS = "activations"
"""What autograd keeps for the backward."""


class MemoryTracker(DispatchMode):
    """Counts storages, each once, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        """Bytes that live now, by purpose."""
        self.total = 0
        """The same, together."""
        self.phase = ""
        """What is going on, for `peak_phase`."""
        self.peak = 0
        """The most that lived at once."""
        self.peak_phase = ""
        """The phase of that moment."""
        self.at_peak: Mapping[str, int] = {}
        """What lived at that moment, by purpose."""
        self.most_activations = 0
        """The most that autograd kept at once."""
        self._held: dict[int, tuple[weakref.ref[Any], int, str]] = {}

    def enter_all(self, tensors: Iterable[Tensor], purpose: str) -> None:
        """Count tensors that are there already."""
        for tensor in tensors:
            self._see(tensor, purpose)

    def claim(self, tensor: Tensor, purpose: str) -> None:
        """Say what a tensor is for; one whose purpose is known keeps it."""
        for part in _parts(tensor):
            self.claim(part, purpose)
        if tensor.layout != torch.strided:
            return
        self._see(tensor, TEMPORARY)
        key = storage_key(tensor.untyped_storage())
        reference, size, before = self._held[key]
        if before == TEMPORARY:
            self._held[key] = (reference, size, purpose)
            self.live[before] -= size
            self.live[purpose] += size
            self.most_activations = max(self.most_activations, self.live[ACTIVATIONS])

    def saving(self) -> saved_tensors_hooks:
        """While this is entered, what autograd saves is claimed as activations."""

        def pack(tensor: Tensor) -> Tensor:
            self.claim(tensor, ACTIVATIONS)
            return tensor.detach()  # the tensor itself would keep its own graph alive

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, TEMPORARY)
        return result

    def _see(self, tensor: Tensor, purpose: str) -> None:
        if tensor.layout != torch.strided:
            for part in _parts(tensor):
                self._see(part, purpose)
            return
        storage = tensor.untyped_storage()
        key, size = storage_key(storage), storage.nbytes()
        held = self._held.get(key)
        if held is None:
            self._held[key] = (weakref.ref(storage, lambda _: self._free(key)), size, purpose)
            self._add(purpose, size)
        elif held[1] != size:  # an operation has resized it
            self._held[key] = (held[0], size, held[2])
            self._add(held[2], size - held[1])

    def _add(self, purpose: str, size: int) -> None:
        self.live[purpose] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.peak_phase, self.at_peak = self.total, self.phase, dict(self.live)

    def _free(self, key: int) -> None:
        _, size, purpose = self._held.pop(key)
        self._add(purpose, -size)


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """The dense tensors of a sparse gradient, such as an embedding's; other layouts are not counted."""
    return (sparse_indices(tensor), sparse_values(tensor)) if tensor.layout == torch.sparse_coo else ()
