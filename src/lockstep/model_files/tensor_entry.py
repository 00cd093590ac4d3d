"""What all kinds of model files have in common: name, shape and dtype of a tensor are known before it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Stored(Protocol):
    """A tensor in a file, or in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size in each dimension."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its element type."""
        ...

    def read(self) -> Tensor:
        """The tensor; it may be a view of the mapped file, of which a change does not get there."""
        ...

    def read_into(self, target: Tensor) -> None:
        """Overwrite the target, which has this shape, with the values."""
        ...


@dataclass(frozen=True)
class InFile:
    """What is known of a tensor in a file before it is read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class InMemory:
    """A tensor that is there already."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype

    def read(self) -> Tensor:
        """The tensor itself."""
        return self._tensor

    def read_into(self, target: Tensor) -> None:
        """Copy."""
        target.copy_(self._tensor)


Entries = Mapping[str, Any]
"""By name: Stored for a tensor; anything else for what a module keeps besides tensors (its extra state)."""


def as_entries(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict seen like the content of a file."""
    return {name: InMemory(value) if isinstance(value, Tensor) else value for name, value in state_dict.items()}


def read_all(entries: Entries) -> dict[str, Any]:
    """The content of a file seen like a state dict."""
    return {name: entry.read() if is_stored(entry) else entry for name, entry in entries.items()}


def is_stored(entry: Any) -> bool:
    """Whether the entry is a tensor."""
    return hasattr(entry, "read_into")


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
