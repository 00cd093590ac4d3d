"""Data sets whose samples are their own numbers, for tests of who gets which."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[Tensor]):
    """Indexed; it remembers which samples were read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Tensor:
        if not 0 <= place < self.count:
            raise IndexError
        self.read.append(int(place))
        return torch.tensor(int(place))


class Stream(IterableDataset[Tensor]):
    """A stream of unknown length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(place) for place in range(self.count))


class SizedStream(Stream):
    """One that knows its length."""

    def __len__(self) -> int:
        return self.count
