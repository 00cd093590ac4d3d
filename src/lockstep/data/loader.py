"""A prepared loader: this rank's share, on this rank's device, one batch ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from lockstep.comm.trees import send_to_device
from lockstep.config.handlers import DataLoaderConfiguration
from lockstep.data.sampler import SeedableRandomSampler
from lockstep.data.shards import UNKNOWN, DealtBatchSampler, ShardedBatchSampler, ShardedIterable, check_split
from lockstep.topology.topology import Topology


class PreparedDataLoader(DataLoader[Any]):
    """The user's loader, sharded. Attributes that are not its own are those of the loader it was made from."""

    def __init__(
        self,
        inner: DataLoader[Any],
        *,
        batches_before: int | None,
        total_batch_size: int | None,
        device: torch.device | None,
        non_blocking: bool,
        open_loaders: list[Any],
        synchronize: Callable[[torch.Generator | None], None] | None,
        ranks: int,
    ) -> None:
        # The base class is for isinstance only: everything it would build is in ``inner``.
        self.inner = inner
        self.batches_before = batches_before
        """Batches of the loader before it was prepared; None when it does not know."""
        self._total_batch_size = total_batch_size
        self._device = device if device is not None and device.type != "cpu" else None
        self._non_blocking = non_blocking
        self._open_loaders = open_loaders
        self._synchronize = synchronize
        self._ranks = ranks
        self.end_of_dataloader = False
        """Whether the batch being worked on is the last."""
        self.remainder = UNKNOWN
        """Real samples in the last global batch: 0 when it is complete, -1 while unknown."""
        self._left: int | None = None
        self.iteration = 0
        """How often this loader has been iterated."""

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks work on at a time."""
        return self._total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set."""
        dataset = self.inner.dataset
        return len(dataset.inner if isinstance(dataset, ShardedIterable) else dataset)  # type: ignore[arg-type]

    @property
    def remaining(self) -> int | None:
        """Batches left, the current one included; None when nobody knows."""
        return self._left

    def real(self, rows: int) -> int:
        """How many of the rows that all ranks have for the last batch are real; they come first."""
        if self.inner.batch_sampler is None:
            return rows * self.remainder // self._ranks  # the data set batches by itself: its batches are counted
        return self.remainder

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and data set which epoch comes next."""
        self.iteration = epoch
        for part in _parts(self.inner):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._synchronize is not None:
            self._synchronize(sampler_generator(self.inner))
        self._close()
        self._open_loaders.append(self)
        self.end_of_dataloader = False
        self.remainder = UNKNOWN
        try:
            self._left = len(self.inner)
        except TypeError:
            self._left = None
        try:
            yield from self._ahead()
        finally:
            self._close()

    def _ahead(self) -> Iterator[Any]:
        """The batches; each is handed out when it is known whether another follows."""
        batches = iter(self.inner)
        try:
            current = next(batches)
        except StopIteration:
            return
        move = self._device is not None
        for following in batches:
            yield send_to_device(current, self._device, self._non_blocking) if move else current
            current = following
            if self._left is not None:
                self._left -= 1
        self.remainder = _remainder(self.inner)
        self.end_of_dataloader = True
        self.iteration += 1
        yield send_to_device(current, self._device, self._non_blocking) if move else current

    def _close(self) -> None:
        while any(loader is self for loader in self._open_loaders):
            place = next(place for place, loader in enumerate(self._open_loaders) if loader is self)
            del self._open_loaders[place]
        self.end_of_dataloader = False


def prepare_loader(
    loader: DataLoader[Any],
    topology: Topology,
    options: DataLoaderConfiguration,
    *,
    device: torch.device | None,
    open_loaders: list[Any],
    synchronize: Callable[[torch.Generator | None], None] | None,
    own_generator: bool,
) -> PreparedDataLoader:
    """This rank's part of a loader.

    With ``own_generator`` a shuffled order comes from a generator of its own, which ``synchronize`` puts in step;
    without it from torch's.
    """
    try:
        before: int | None = len(loader)
    except TypeError:
        before = None
    inner = copy.copy(loader)
    inner.__dict__["_iterator"] = None
    if options.use_seedable_sampler:
        _make_seedable(inner, options.data_seed)
    if topology.world_size > 1:
        _shard(inner, topology, options)
        if own_generator:
            _own_generator(inner)
    batch_size = _batch_size(loader)
    total = batch_size if batch_size is None or options.split_batches else batch_size * topology.world_size
    return PreparedDataLoader(
        inner,
        batches_before=before,
        total_batch_size=total,
        device=device,
        non_blocking=options.non_blocking,
        open_loaders=open_loaders,
        synchronize=synchronize if topology.world_size > 1 else None,
        ranks=topology.world_size,
    )


def _shard(inner: DataLoader[Any], topology: Topology, options: DataLoaderConfiguration) -> None:
    place: dict[str, Any] = {"rank": topology.rank, "world_size": topology.world_size, "even": options.even_batches}
    split = options.split_batches
    changes: dict[str, Any] = {}
    if isinstance(inner.dataset, IterableDataset):
        changes["dataset"] = ShardedIterable(
            inner.dataset, batch_size=inner.batch_size, drop_last=inner.drop_last, split=split, **place
        )
        if split:
            # Each rank collates its slice only; torch counts the batches of an iterable by ``batch_size``.
            changes["batch_size"] = check_split(inner.batch_size, topology.world_size)
            changes["batch_sampler"] = BatchSampler(inner.sampler, changes["batch_size"], inner.drop_last)
    elif inner.batch_sampler is None:
        if split:
            check_split(None, topology.world_size)
        changes["sampler"] = DealtBatchSampler(inner.sampler, **place)
    elif isinstance(getattr(inner.batch_sampler, "batch_size", None), int):
        changes["batch_sampler"] = ShardedBatchSampler(inner.batch_sampler, split=split, **place)  # type: ignore[arg-type]
    else:
        if split:
            check_split(None, topology.world_size)
        changes["batch_sampler"] = DealtBatchSampler(inner.batch_sampler, **place)
    inner.__dict__.update(changes)  # the class forbids setting these after it was made; this copy is being made


def _make_seedable(inner: DataLoader[Any], seed: int | None) -> None:
    seed = torch.initial_seed() % 2**31 if seed is None else seed
    holder = inner.batch_sampler if inner.batch_sampler is not None else inner
    sampler = getattr(holder, "sampler", None)
    if type(sampler) is not RandomSampler:
        return  # an order that is not shuffled is a function already; a custom sampler's is its own business
    fresh = SeedableRandomSampler(sampler, seed)
    inner.__dict__["sampler"] = fresh
    if inner.batch_sampler is not None:
        copied = copy.copy(inner.batch_sampler)
        copied.sampler = fresh  # type: ignore[attr-defined]
        inner.__dict__["batch_sampler"] = copied


def _own_generator(inner: DataLoader[Any]) -> None:
    """Give a shuffling sampler a generator that can be put in step between ranks."""
    for part in _parts(inner)[:-1]:  # the samplers; a data set's generator is its own
        if getattr(part, "generator", part) is None:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
            part.generator = generator


def sampler_generator(inner: DataLoader[Any]) -> torch.Generator | None:
    """The generator that decides the order, if there is one."""
    for part in _parts(inner):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def _parts(inner: DataLoader[Any]) -> list[Any]:
    """What takes part in deciding the order: samplers, outermost first, then the data set."""
    found: list[Any] = []
    pending: Sequence[Any] = [inner.batch_sampler, inner.sampler]
    while pending:
        part, *pending = pending
        if part is None or any(part is other for other in found):
            continue
        found.append(part)
        pending = [*pending, getattr(part, "inner", None), getattr(part, "sampler", None)]
    return [*found, inner.dataset]


def _batch_size(loader: DataLoader[Any]) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _remainder(inner: DataLoader[Any]) -> int:
    for part in (inner.batch_sampler, inner.sampler):
        if isinstance(part, (ShardedBatchSampler, DealtBatchSampler)):
            return part.remainder
    if isinstance(inner.dataset, ShardedIterable):
        return inner.dataset.remainder if inner.num_workers == 0 else UNKNOWN
    return 0
