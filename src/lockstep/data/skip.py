"""The loader of a script that has not been prepared, without its first batches; it can be prepared afterwards."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from lockstep.torch_internals.data_loader import forget_iterator


def skip_unprepared(loader: DataLoader[Any], batches: int) -> DataLoader[Any]:
    """The same loader without its first batches; none of their samples is read where the dataset has indices."""
    copied = copy.copy(loader)
    forget_iterator(copied)
    if isinstance(loader.dataset, IterableDataset):
        changes: dict[str, Any] = {"dataset": SkippedStream(loader.dataset, batches, loader.batch_size or 1)}
    elif loader.batch_sampler is None:
        changes = {"sampler": SkippedSampler(loader.sampler, batches)}
    else:
        changes = {"batch_sampler": SkippedSampler(loader.batch_sampler, batches)}
    copied.__dict__.update(changes)  # the class forbids setting these after it was made; this copy is being made
    return copied


class _Delegates:
    """Attributes that are not its own are those of what it was made from."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)


class SkippedSampler(_Delegates, Sampler[Any]):
    """A sampler, or a batch sampler, without what it gives first."""

    def __init__(self, inner: Any, skipped: int) -> None:
        self.inner = inner
        self.skipped = skipped

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.inner, self.skipped, None)

    def __len__(self) -> int:
        return max(0, len(self.inner) - self.skipped)

    def with_sampler(self, sampler: Any) -> SkippedSampler:
        """A copy that gives the batches of another sampler."""
        inner = self.inner
        if isinstance(inner, SkippedSampler):
            return SkippedSampler(inner.with_sampler(sampler), self.skipped)
        copied = copy.copy(inner)
        copied.sampler = sampler
        return SkippedSampler(copied, self.skipped)


class SkippedStream(_Delegates, IterableDataset[Any]):
    """A stream without the items of its first batches. Those of several workers come in turn."""

    def __init__(self, inner: Any, batches: int, batch_size: int) -> None:
        self.inner = inner
        self.batches = batches
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        own = max(0, -(-(self.batches - worker) // workers))
        return itertools.islice(self.inner, own * self.batch_size, None)

    def __len__(self) -> int:
        return max(0, len(self.inner) - self.batches * self.batch_size)
