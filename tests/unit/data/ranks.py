"""Loaders of several ranks, side by side in one process: nothing in them needs to talk."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler

from lockstep.blackbox.box import NoBox
from lockstep.config.handlers import DataLoaderConfiguration
from lockstep.data.loader import PreparedDataLoader
from lockstep.data.prepare import prepare_loader
from tests.datasets import Numbers, Stream


class Backwards(Sampler[int]):
    """A sampler that only itself knows the order of."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


class Bags:
    """A batch sampler whose batches grow and shrink."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        place, size = 0, 1
        while place < self.count:
            yield list(range(place, min(place + size, self.count)))
            place += size
            size = size % 3 + 1

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OddBatches(BatchSampler):
    """One with a batch_size that is not torch's own class."""


KINDS = ("plain", "shuffled", "seeded", "custom", "bags", "odd", "single", "stream")


def make(kind: str, count: int, batch_size: int, *, seed: int = 0, drop_last: bool = False) -> DataLoader[Any]:
    data = Numbers(count)
    if kind == "stream":
        return DataLoader(Stream(count), batch_size=batch_size, drop_last=drop_last)
    if kind == "bags":
        return DataLoader(data, batch_sampler=Bags(count))  # type: ignore[arg-type]
    if kind == "odd":
        return DataLoader(data, batch_sampler=OddBatches(Backwards(count), batch_size, drop_last))
    if kind == "single":
        return DataLoader(data, batch_size=None)
    if kind == "custom":
        return DataLoader(data, batch_size=batch_size, sampler=Backwards(count), drop_last=drop_last)
    generator = torch.Generator().manual_seed(seed) if kind == "shuffled" else None
    return DataLoader(data, batch_size=batch_size, shuffle=kind != "plain", generator=generator, drop_last=drop_last)


def prepare(
    loader: DataLoader[Any], rank: int, world_size: int, *, seeded: bool = False, sparing: bool = False, **options: Any
) -> PreparedDataLoader:
    group: Any = SimpleNamespace(rank=rank, world_size=world_size, scopes=0, clock=None, box=NoBox())
    seed = {"use_seedable_sampler": True, "data_seed": 3} if seeded else {}
    options = {"dispatch_batches": False, **seed, **options}
    return prepare_loader(loader, group, DataLoaderConfiguration(**options), pad_empty_ranks_only=sparing)


def ranks_of(kind: str, count: int, batch_size: int, world_size: int, **options: Any) -> list[PreparedDataLoader]:
    drop_last = options.pop("drop_last", False)
    return [
        prepare(
            make(kind, count, batch_size, drop_last=drop_last), rank, world_size, seeded=kind == "seeded", **options
        )
        for rank in range(world_size)
    ]


def values(batch: Tensor) -> list[int]:
    found: list[int] = batch.reshape(-1).tolist()
    return found


def real(loader: PreparedDataLoader, batch: Tensor, rank: int) -> list[int]:
    """The rows of a batch that are no repeats."""
    assert loader.current is not None
    return values(batch)[: loader.current.real[rank]]


def gathered(loaders: list[PreparedDataLoader]) -> list[int]:
    """What gathering every round over the ranks gives, without repeats."""
    hands = [[real(loader, batch, rank) for batch in loader] for rank, loader in enumerate(loaders)]
    rounds = max((len(hand) for hand in hands), default=0)
    return [item for number in range(rounds) for hand in hands if number < len(hand) for item in hand[number]]
