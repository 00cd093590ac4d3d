"""A shuffled order that is a function of seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order in epoch ``e`` follows from ``seed + e`` alone."""

    def __init__(self, inner: RandomSampler, seed: int) -> None:
        super().__init__(
            inner.data_source,
            replacement=inner.replacement,
            # None where it is not told: the dataset's size of the moment counts then.
            num_samples=None if inner.num_samples == len(inner.data_source) else inner.num_samples,
            generator=torch.Generator(),
        )
        self.seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""
        self.epoch = epoch
