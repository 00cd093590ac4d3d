"""Streams that several workers read, on several ranks: one tail for each epoch, and no sample lost.

The workers and ranks are simulated in one process, in the order in which torch's loader takes batches from them; a few
cases run with real worker processes.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from lockstep.data import shards
from lockstep.data.dispatch import _scatter
from lockstep.data.global_batch import GlobalBatch
from lockstep.data.iteration import Iteration
from lockstep.data.loader import PreparedDataLoader
from tests.unit.data.ranks import prepare, values


class Split(IterableDataset[Any]):
    """Splits itself between workers: in turn, or by parts of unequal lengths."""

    def __init__(self, count: int, contiguous: bool = False, convert: Callable[[int], Any] = torch.tensor) -> None:
        self.count, self.contiguous, self.convert = count, contiguous, convert

    def __iter__(self) -> Iterator[Any]:
        info = shards.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self.contiguous:  # the first worker has most, the last may have none
            ends = [math.ceil(self.count * (1 - 0.5**number)) for number in range(workers)] + [self.count]
            return (self.convert(number) for number in range(ends[worker], ends[worker + 1]))
        return (self.convert(number) for number in range(worker, self.count, workers))


class SizedSplit(Split):
    """One that knows its length."""

    def __len__(self) -> int:
        return self.count


class Whole(IterableDataset[Any]):
    """Does not: every worker reads all of it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(number) for number in range(self.count))


class Workers:
    """Torch's loader over a stream, with its workers in this process: they are asked in turn until all have ended."""

    def __init__(self, inner: DataLoader[Any], workers: int) -> None:
        self.__dict__.update(inner.__dict__)
        self.__dict__["num_workers"] = workers
        self._workers = workers

    def _in_worker(self, number: int, step: Callable[[], Any]) -> Any:
        info = SimpleNamespace(id=number, num_workers=self._workers) if self._workers else None
        shards.get_worker_info = lambda: info  # type: ignore[assignment]
        try:
            return step()
        finally:
            shards.get_worker_info = get_worker_info

    def __copy__(self) -> Workers:
        return Workers(cast(Any, self), self._workers)

    def __iter__(self) -> Iterator[Any]:
        batched = self.batch_sampler is not None  # type: ignore[attr-defined]
        batch = range(self.batch_size) if batched else None  # type: ignore[attr-defined]
        fetchers: dict[int, Any] = {}
        for number in range(max(1, self._workers)):
            stream = copy.copy(self.dataset)  # type: ignore[attr-defined]
            collate = copy.copy(self.collate_fn)  # type: ignore[attr-defined]
            collate.stream = stream
            made = (stream, batched, collate, self.drop_last)  # type: ignore[attr-defined]
            fetchers[number] = self._in_worker(number, lambda made=made: _IterableDatasetFetcher(*made))
        return self._batches(fetchers, batch)  # the workers have their copies from here on, as processes would

    def _batches(self, fetchers: dict[int, Any], batch: Any) -> Iterator[Any]:
        while fetchers:
            for number in list(fetchers):
                try:
                    yield self._in_worker(number, lambda number=number: fetchers[number].fetch(batch))
                except StopIteration:
                    del fetchers[number]


def ranks_of(
    data: Any, world_size: int, workers: int, batch_size: int | None, drop_last: bool, **options: Any
) -> list[Any]:
    loaders = []
    kind = {"batch_size": batch_size, **({"drop_last": True} if drop_last and batch_size else {})}
    for rank in range(world_size):
        loader = prepare(DataLoader(data, **kind), rank, world_size, **options)
        loader.inner = Workers(loader.inner, workers)  # type: ignore[assignment]
        loader._spare = [(loader.inner, loader.shard)]
        loaders.append(loader)
    return loaders


Step = tuple[list[int], int, list[int]]
"""What a rank has in a step, how much of it is real, and the places of the workers after it."""


def steps_of(loaders: list[PreparedDataLoader]) -> list[list[Step]]:
    """For each rank its steps. Where rank 0 reads for all, what it would send; the places are its own."""
    if not loaders[0].dispatched:
        found = []
        for rank, loader in enumerate(loaders):
            mine: list[Step] = []
            for batch in loader:
                now = loader._epoch.newest
                assert now is not None
                assert now.round is not None
                assert len(values(batch)) == now.round.rows[rank]
                mine.append((values(batch), now.round.real[rank], list(now.places)))
            found.append(mine)
        return found
    loader, ranks = loaders[0], len(loaders)
    iteration, (inner, shard) = Iteration(loader), loader.borrow()
    iteration._begin(inner, shard)
    places = iteration.places
    hands: list[list[Step]] = [[] for _ in loaders]
    read: deque[tuple[GlobalBatch, Any]] = deque()
    for parcels in _scatter(iteration._shares(inner, shard, read), ranks, loader.even_batches):
        for rank, parcel in enumerate(parcels):
            for batch, round_, _ in parcel:
                if rank == 0:  # as each is handed out there
                    for part, _ in [read.popleft() for _ in range(min(ranks, len(read)))]:
                        part.pass_on(places)
                hands[rank].append((values(batch), round_.real[rank], list(places)))
    return hands


def real(hands: list[list[Step]]) -> list[int]:
    return [item for hand in hands for items, count, _ in hand for item in items[:count]]


kinds = given(
    count=st.integers(0, 50),
    batch_size=st.sampled_from([None, 1, 2, 3, 4, 12]),
    world_size=st.integers(1, 4),
    workers=st.integers(0, 3),
    split=st.sampled_from(["in turn", "contiguous", "whole"]),
    drop_last=st.booleans(),
    even=st.booleans(),
    dispatch=st.booleans(),
    split_batches=st.booleans(),
    sparing=st.booleans(),
    stop=st.floats(0, 1),
    other=st.integers(1, 4),
)


@settings(max_examples=300, deadline=None)
@kinds
def test_one_tail_for_each_epoch(
    count: int,
    batch_size: int | None,
    world_size: int,
    workers: int,
    split: str,
    drop_last: bool,
    even: bool,
    dispatch: bool,
    split_batches: bool,
    sparing: bool,
    stop: float,
    other: int,
) -> None:
    if split_batches and (batch_size is None or batch_size % world_size):
        split_batches = False
    drop_last = drop_last and batch_size is not None
    options = {"even_batches": even, "dispatch_batches": dispatch, "split_batches": split_batches, "sparing": sparing}
    data: Any = Whole(count) if split == "whole" else SizedSplit(count, split == "contiguous")
    total = count * max(1, workers) if split == "whole" else count
    share = (batch_size or 1) // (world_size if split_batches else 1)
    size = share * world_size

    def made(ranks: int = world_size) -> list[Any]:
        return ranks_of(data, ranks, workers, batch_size, drop_last, **options)

    loaders = made()
    hands = steps_of(loaders)
    seen = sorted(real(hands))
    everything = sorted([*range(count)] * (total // count if count else 0))
    alone = world_size == 1  # and then each worker's last batch is short, as torch has it
    if drop_last:
        assert [item for item in seen if item not in everything] == []
        assert len(seen) == total - total % size or alone
    else:
        assert seen == everything
    if not alone:
        steps = [len(hand) for hand in hands]
        if even:
            assert set(steps) == {total // size if drop_last else math.ceil(total / size)}
        if split != "whole":
            assert steps == [len(loader) for loader in made()] or (dispatch and not even)
            assert steps[0] == len(loaders[0])
        repeated = sum(len(items) for hand in hands for items, _, _ in hand) - len(seen)
        if not sparing or not even:
            assert repeated == ((-total) % size if even and not drop_last and total else 0)
    skip = int(stop * (len(hands[0]) + 1))
    short = [cast(Any, loader).skipping(skip) for loader in made()]
    if (not alone or workers < 2) and even and split != "whole":
        assert len(short[0]) == max(0, len(hands[0]) - skip)
    # What fills the last round is another matter.
    assert [[items[:own] for items, own, _ in hand] for hand in steps_of(short)] == [
        [items[:own] for items, own, _ in hand[skip:]] for hand in hands
    ]
    # Resumed after any step, on as many ranks or another number: what is left comes, and nothing else.
    if not hands[0]:
        return
    at = min(int(stop * len(hands[0])), len(hands[0]) - 1)
    before = [hand[: at + 1] for hand in hands]
    for ranks in {world_size, world_size if split_batches else other}:
        again = made(ranks)
        state = {**again[0].state_dict(), "places": hands[0][at][2], "begun": True}
        for loader in again:
            loader.load_state_dict(state)
        rest = steps_of(again)
        if not drop_last:
            assert sorted(real(before) + real(rest)) == everything
        if even and not alone and ranks == world_size:
            assert [at + 1 + len(hand) for hand in rest] == [len(hand) for hand in hands]
