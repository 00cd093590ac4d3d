"""From the user's loader to this rank's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from lockstep.config.handlers import DataLoaderConfiguration
from lockstep.data import loader_state
from lockstep.data.current_batch import CurrentBatch
from lockstep.data.loader import PreparedDataLoader
from lockstep.data.sampler import SeedableRandomSampler
from lockstep.data.shards import BatchSamplerShard, Shard, ShardedBatchSampler, ShardedIterable, ShardSpec
from lockstep.data.skip import SkippedSampler, skip_unprepared
from lockstep.data.tagged_batch import Tagging
from lockstep.errors import ConfigError, UsageError
from lockstep.process_group.group import Group
from lockstep.topology.data_parallel import DataParallelRanks
from lockstep.torch_internals.data_loader import forget_iterator


def prepare_loader(
    loader: DataLoader[Any],
    group: Group,
    options: DataLoaderConfiguration,
    *,
    device: torch.device | None = None,
    current_batch: CurrentBatch | None = None,
    synchronize: Callable[[Group, torch.Generator | None], None] | None = None,
    own_generator: bool = False,
    pad_empty_ranks_only: bool = False,
    name: str = "",
    after_batch: Callable[[], None] | None = None,
    data_parallel: DataParallelRanks | None = None,
) -> PreparedDataLoader:
    """This rank's part of a loader.

    With ``own_generator`` a shuffled order comes from a generator of its own, which ``synchronize`` puts in step;
    without it from torch's. With ``pad_empty_ranks_only`` only ranks that would go empty in the last round get
    repeated samples. ``name`` is the loader's on all ranks: under it they compare what they have seen.
    ``after_batch`` is called when the script is done with a batch.
    ``data_parallel`` says who has which part of a batch; without it each rank has one of its own.
    """
    parallel = data_parallel or DataParallelRanks(group.rank, range(group.world_size))
    try:
        before: int | None = len(loader)
    except TypeError:
        before = None
    inner = copy.copy(loader)
    forget_iterator(inner)
    if hasattr(inner, "in_order"):
        inner.in_order = True  # or nobody could tell which batch is which
    if options.use_seedable_sampler:
        _make_seedable(inner, options.data_seed)
    streams = isinstance(inner.dataset, IterableDataset)
    # A stream may differ from rank to rank: unless told otherwise, one rank reads it for all.
    dispatched = group.world_size > 1 and (
        options.dispatch_batches if options.dispatch_batches is not None else streams
    )
    spec = ShardSpec(
        rank=parallel.rank,
        world_size=parallel.size,
        even=options.even_batches,
        reads_for_all=dispatched and group.rank == 0,
        pad_empty_ranks_only=pad_empty_ranks_only,
    )
    shard = _shard(inner, spec, options.split_batches)
    if options.use_stateful_dataloader:
        inner = _stateful(inner)
    if own_generator and group.world_size > 1:
        loader_state.own_generator(inner)
    batch_size = _batch_size(loader)
    total = batch_size if batch_size is None or options.split_batches else batch_size * parallel.size
    return PreparedDataLoader(
        inner,
        shard,
        group,
        parallel=parallel,
        dataset=loader.dataset,
        batches_before=before,
        total_batch_size=total,
        device=device,
        non_blocking=options.non_blocking,
        dispatched=dispatched,
        current_batch=current_batch or CurrentBatch(),
        synchronize=synchronize if group.world_size > 1 else None,
        name=name,
        after_batch=after_batch,
    )


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """The loader without its first batches, none of which is read where the data set has indices.

    Args:
        dataloader: A prepared loader, or any of torch's, which can be prepared afterwards.
        num_batches: How many batches of this process to leave out, each time it is iterated.
    """
    if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 0:
        raise ConfigError(f"num_batches={num_batches!r} is not a number of batches. Allowed: 0 and more.")
    if not isinstance(dataloader, DataLoader):
        raise UsageError(f"skip_first_batches needs a DataLoader, not a {type(dataloader).__name__}.")
    if isinstance(dataloader, PreparedDataLoader):
        return dataloader.skipping(num_batches)
    return skip_unprepared(dataloader, num_batches)


def _shard(inner: DataLoader[Any], spec: ShardSpec, split: bool) -> Shard:
    """Have the copied loader give this rank's share only."""
    shard: Shard
    changes: dict[str, Any] = {}
    if isinstance(inner.dataset, IterableDataset):
        shard = stream = ShardedIterable(
            inner.dataset, spec, batch_size=inner.batch_size, drop_last=inner.drop_last, split=split
        )
        changes["dataset"] = shard
        changes["collate_fn"] = Tagging(stream, inner.collate_fn)
        if split:
            changes["batch_size"] = stream.share  # each rank collates its slice only
            changes["batch_sampler"] = BatchSampler(inner.sampler, stream.share, inner.drop_last)
    elif inner.batch_sampler is None:
        shard = BatchSamplerShard(inner.sampler, spec, split=split)
        changes["sampler"] = shard
    elif type(inner.batch_sampler) is BatchSampler:
        shard = ShardedBatchSampler(inner.batch_sampler, spec, split=split)
        changes["batch_sampler"] = shard
    else:
        shard = BatchSamplerShard(inner.batch_sampler, spec, split=split)
        changes["batch_sampler"] = shard
    inner.__dict__.update(changes)  # the class forbids setting these after it was made; this copy is being made
    return shard


def _make_seedable(inner: DataLoader[Any], seed: int | None) -> None:
    seed = torch.initial_seed() % 2**31 if seed is None else seed
    holder = inner.batch_sampler if inner.batch_sampler is not None else inner
    sampler = getattr(holder, "sampler", None)
    if type(sampler) is not RandomSampler:
        return  # an order that is not shuffled is a function already; a custom sampler's is its own business
    fresh = SeedableRandomSampler(sampler, seed)
    inner.__dict__["sampler"] = fresh
    if inner.batch_sampler is not None:
        if isinstance(inner.batch_sampler, SkippedSampler):
            copied: Any = inner.batch_sampler.with_sampler(fresh)
        else:
            copied = copy.copy(inner.batch_sampler)
            copied.sampler = fresh
        inner.__dict__["batch_sampler"] = copied


def _stateful(inner: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader as torchdata's, which also keeps the state of the data set and of each worker."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise ConfigError(
            "use_stateful_dataloader=True needs torchdata 0.8 or newer, which is not installed. "
            "Run: pip install 'torchdata>=0.8'. Without it a prepared loader has state_dict() too; only iterable data "
            "sets with a state of their own need torchdata."
        ) from error
    if isinstance(inner, StatefulDataLoader):
        return inner
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "persistent_workers")
    options = {name: getattr(inner, name) for name in (*names, "collate_fn", "multiprocessing_context", "generator")}
    made = StatefulDataLoader(inner.dataset, batch_size=1, **options)
    made.__dict__.update(
        {name: inner.__dict__[name] for name in ("batch_size", "drop_last", "sampler", "batch_sampler")}
    )
    return made


def _batch_size(loader: DataLoader[Any]) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
