"""Cutting a data set's order between ranks.

Every rank walks the same global order and keeps its own part: whole batches dealt in turn, or, with
``split_batches``, a slice of each batch. With ``even`` the last round is filled up with samples from the start, so
that all ranks get equally many batches; ``remainder`` then says how many samples of that round are real.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, Sampler

from lockstep.errors import ConfigError

UNKNOWN = -1
"""The remainder of a round that nobody has seen yet."""


def check_split(batch_size: int | None, world_size: int) -> int:
    """The slice of a batch that each rank gets."""
    if batch_size is None:
        raise ConfigError(
            "split_batches=True needs a loader with a fixed batch_size; this one has none. "
            "Leave split_batches out, or give the loader a batch_size."
        )
    if batch_size % world_size:
        raise ConfigError(
            f"split_batches=True cuts each batch into equal parts, and a batch of {batch_size} cannot be cut into "
            f"{world_size}. Use a batch_size that is a multiple of {world_size}."
        )
    return batch_size // world_size


class Dealer:
    """Deals items in rounds of fixed size; each rank takes its slice of every round."""

    def __init__(self, *, rank: int, world_size: int, share: int, drop_last: bool, even: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.share = share
        """Items per rank and round."""
        self.drop_last = drop_last
        self.even = even
        self.remainder = UNKNOWN

    def deal(self, items: Iterable[Any], first: Sequence[Any] | None = None) -> Iterator[list[Any]]:
        """This rank's slice of each round; ``first`` is the first round, if it was dealt before."""
        size = self.share * self.world_size
        mine = slice(self.rank * self.share, (self.rank + 1) * self.share)
        open_round: list[Any] = []
        self.remainder = UNKNOWN
        for item in items:
            open_round.append(item)
            if len(open_round) == size:
                yield open_round[mine]
                first = first or open_round
                open_round = []
        self.remainder = 0
        if not open_round or self.drop_last:
            return
        self.remainder = len(open_round)
        if self.even:
            filler = first or open_round
            fill = [filler[place % len(filler)] for place in range(size - len(open_round))]
            yield (open_round + fill)[mine]
        elif open_round[mine]:
            yield open_round[mine]

    def deal_batches(self, batches: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
        """The same for items that come in batches; whole batches are dealt without being taken apart."""
        stream = iter(batches)
        first: Sequence[Any] | None = None
        full: list[Sequence[Any]] = []
        size = self.share * self.world_size
        for batch in stream:
            if len(batch) == size and not full:
                yield batch[self.rank * self.share : (self.rank + 1) * self.share]
                first = batch if first is None else first
                continue
            full.append(batch)
            if len(batch) != self.share:
                break
            if len(full) == self.world_size:
                yield full[self.rank]
                first = [item for part in full for item in part] if first is None else first
                full = []
        yield from self.deal((item for part in itertools.chain(full, stream) for item in part), first)

    def rounds(self, items: int) -> int:
        """How many slices this rank gets of so many items."""
        size = self.share * self.world_size
        full, rest = divmod(items, size)
        if not rest or self.drop_last:
            return full
        return full + (1 if self.even else int(rest > self.rank * self.share))


class ShardedBatchSampler(BatchSampler):
    """This rank's batches of a batch sampler whose batches have a fixed size."""

    def __init__(self, inner: BatchSampler, *, rank: int, world_size: int, split: bool, even: bool) -> None:
        # The base class is for isinstance only.
        self.inner = inner
        self.sampler = inner.sampler
        self.drop_last = bool(getattr(inner, "drop_last", False))
        self.batch_size = inner.batch_size
        share = check_split(inner.batch_size, world_size) if split else inner.batch_size
        self._dealer = Dealer(rank=rank, world_size=world_size, share=share, drop_last=self.drop_last, even=even)

    def __iter__(self) -> Iterator[Any]:
        return self._dealer.deal_batches(self.inner)

    def __len__(self) -> int:
        return self._dealer.rounds(_count(self.inner))

    @property
    def remainder(self) -> int:
        """Real samples in the last round; 0 when it was complete."""
        return self._dealer.remainder


def _count(inner: BatchSampler) -> int:
    """How many indices a batch sampler gives in all; its last batch counts as it really is where that is known."""
    sampler = getattr(inner, "sampler", None)
    if type(inner) is BatchSampler and sampler is not None:
        total = len(sampler)
        return total - total % inner.batch_size if inner.drop_last else total
    return len(inner) * inner.batch_size


class DealtBatchSampler(Sampler[Any]):
    """This rank's batches of any batch sampler, dealt whole: batches keep the size their sampler gave them."""

    def __init__(self, inner: Any, *, rank: int, world_size: int, even: bool) -> None:
        self.inner = inner
        self.drop_last = bool(getattr(inner, "drop_last", False))
        self._dealer = Dealer(rank=rank, world_size=world_size, share=1, drop_last=False, even=even)
        self._last_round: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        self._last_round = []
        for (batch,) in self._dealer.deal(self._noted()):
            yield batch

    def _noted(self) -> Iterator[Any]:
        for batch in self.inner:
            size = len(batch) if isinstance(batch, Sequence) else 1
            if len(self._last_round) == self._dealer.world_size:
                self._last_round = []
            self._last_round.append(size)
            yield batch

    def __len__(self) -> int:
        return self._dealer.rounds(len(self.inner))

    @property
    def remainder(self) -> int:
        """Real samples in the last round; 0 when it was complete."""
        return sum(self._last_round) if self._dealer.remainder > 0 else self._dealer.remainder


class ShardedIterable(IterableDataset[Any]):
    """This rank's items of an iterable data set. Every rank reads the whole stream and keeps its part."""

    def __init__(
        self,
        inner: Any,
        *,
        batch_size: int | None,
        drop_last: bool,
        rank: int,
        world_size: int,
        split: bool,
        even: bool,
    ) -> None:
        self.inner = inner
        share = check_split(batch_size, world_size) if split else (batch_size or 1)
        self._dealer = Dealer(rank=rank, world_size=world_size, share=share, drop_last=drop_last, even=even)

    def __iter__(self) -> Iterator[Any]:
        for part in self._dealer.deal(self.inner):
            yield from part

    def __len__(self) -> int:
        return self._dealer.rounds(len(self.inner)) * self._dealer.share

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set which epoch begins, if it wants to know."""
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)

    @property
    def remainder(self) -> int:
        """Real items in the last round; unknown while workers read in other processes."""
        return self._dealer.remainder

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)
