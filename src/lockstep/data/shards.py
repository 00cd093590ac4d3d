"""Cutting a data set's order between ranks, in rounds: one batch for every rank.

Every rank knows the whole order and keeps its own part: whole batches dealt in turn, or, with ``split_batches``, a
slice of each batch. So each rank can say what all the others hold, without asking them: the ``GlobalBatch`` that goes
beside every batch. A last round that is not full is filled up with samples from the start of the epoch where ``even``
asks for equally many batches on all ranks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, Sampler, get_worker_info

from lockstep.data.global_batch import GlobalBatch, name_samples
from lockstep.data.sampler_order import IterOrder, draw_globally, open_order
from lockstep.data.worker_tails import pack
from lockstep.errors import ConfigError, DataError

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


class ShardSpec:
    """Who gets what of a round."""

    def __init__(
        self, *, rank: int, world_size: int, even: bool, reads_for_all: bool = False, pad_empty_ranks_only: bool = False
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.even = even
        """Whether all ranks get equally many batches, filled with repeats."""
        self.reads_for_all = reads_for_all
        """Whether all parts of a round are taken here, one after the other: this rank reads for the others."""
        self.pad_empty_ranks_only = pad_empty_ranks_only
        """Whether a batch that holds a sample of its own is not filled up: only ranks that would go empty get some."""

    @property
    def pads_last(self) -> bool:
        """Whether the last round is filled up; one process has nobody to keep in step with."""
        return self.even and self.world_size > 1

    def tail(self, start: int, share: int, left: int) -> GlobalBatch:
        """The last round, with ``left`` samples for parts of ``share``."""
        real = tuple(max(0, min(share, left - rank * share)) for rank in range(self.world_size))
        if not self.pads_last:
            return GlobalBatch(start, real, real, size=share)
        return GlobalBatch(
            start, tuple((own if self.pad_empty_ranks_only else 0) or share for own in real), real, size=share
        )

    def parts(self, round_: GlobalBatch, parts: Sequence[Any]) -> Iterator[tuple[GlobalBatch, Any]]:
        """The parts of a round that are dealt here; one that is read for another rank is told apart as that rank's."""
        if not self.reads_for_all:
            if round_.rows[self.rank]:
                yield replace(round_, ids=_ids(parts[self.rank])), parts[self.rank]
            return
        start = round_.start
        for rows, real, part in zip(round_.rows, round_.real, parts, strict=True):
            if rows and (
                real or not self.pad_empty_ranks_only
            ):  # a rank that would go empty is seen to when batches are sent
                yield GlobalBatch(start, (rows,), (real,), _ids(part), round_.worker, round_.size), part
            start += real

    def slices(self, round_: GlobalBatch, items: Sequence[Any], share: int) -> Iterator[tuple[GlobalBatch, Any]]:
        """The same for parts that lie ``share`` apart in ``items``."""
        parts = [items[rank * share : rank * share + rows] for rank, rows in enumerate(round_.rows)]
        return self.parts(round_, parts)

    def rounds(self, count: int, size: int, drop_last: bool) -> int:
        """How many of ``count`` items' rounds of ``size`` this rank takes part in."""
        whole, left = divmod(count, size)
        if not left or drop_last:
            return whole
        share = size // self.world_size
        return whole + (1 if self.pads_last or left > self.rank * share else 0)


class Shard:
    """What the samplers and the stream below have in common: where to begin, and the rounds under way."""

    spec: ShardSpec
    sampler: Any
    inner: Any

    def _prepare(self, spec: ShardSpec) -> None:
        self.spec = spec
        self.start = 0
        """Where the next iteration begins; later ones begin at 0."""
        self.skip = 0
        """Rounds that every iteration passes over."""
        self.pending: deque[GlobalBatch] = deque()
        """The rounds of batches that were dealt, but not yet handed out."""
        self.latest: GlobalBatch | None = None
        """The round of the items that a stream is giving out, or else is reading."""
        self.began: Tensor | None = None
        """The state of the order's generator when the epoch began."""
        self.began_epoch = 0
        """The sampler's own count of epochs then."""
        self.again: Tensor | None = None
        """Such a state, for the next iteration to begin with."""
        self.resumes = False
        """Whether the next iteration begins at a place that was restored, whatever is skipped otherwise."""
        self.restored: float | None = None
        """Batches of this rank before that place; None where nobody knows."""

    @property
    def batch_sampler(self) -> Any:
        """The user's own, by the name that Accelerate has for it."""
        return self.inner

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated at the end so that all ranks get equally many batches."""
        return self.spec.even

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.spec.even = bool(value)

    @property
    def skips(self) -> int:
        """Rounds that the next iteration passes over from where it begins."""
        return 0 if self.resumes else self.skip

    def _opening(self) -> tuple[int, int, Tensor | None]:
        start, skips, again = self.start, self.skips, self.again
        self.forget()
        self.pending.clear()
        self.began_epoch = getattr(self.sampler, "epoch", 0)
        return start, skips, again

    def forget(self) -> None:
        """Begin the next iteration at its start."""
        self.start, self.again = 0, None
        self.resumes, self.restored = False, None

    def batches(self) -> int:
        """This rank's batches in an epoch, without those that are skipped; TypeError when nobody knows."""
        raise NotImplementedError

    def left(self) -> int | None:
        """This rank's batches in the next iteration; None when nobody knows."""
        try:
            return self.batches() if self.start == 0 else None
        except TypeError:
            return None

    def places(self, workers: int) -> list[int]:
        """Where the next iteration begins, for each worker of a stream."""
        return [self.start]

    def rounds_before(self, place: int) -> float | None:
        """How many rounds there are up to a place in the epoch; None when nobody knows."""
        return None

    def remainder(self, round_: GlobalBatch) -> int:
        """Real samples in the last round; 0 when it was full."""
        raise NotImplementedError

    def expected_remainder(self) -> int:
        """The same before anything was read; unknown where the last round is dropped, or where nobody can tell."""
        return UNKNOWN


class ShardedBatchSampler(Shard, BatchSampler):
    """This rank's batches of torch's batch sampler over any sampler."""

    def __init__(self, inner: BatchSampler, spec: ShardSpec, *, split: bool) -> None:
        # The base class is for isinstance only.
        self.inner = inner
        self.sampler = inner.sampler
        self.drop_last = inner.drop_last
        self.batch_size = inner.batch_size
        self.share = check_split(inner.batch_size, spec.world_size) if split else inner.batch_size
        self._prepare(spec)

    @property
    def size(self) -> int:
        """Samples in a full round."""
        return self.share * self.spec.world_size

    def __iter__(self) -> Iterator[list[Any]]:
        place, skips, again = self._opening()
        spec, share, size, note = self.spec, self.share, self.size, self.pending.append
        place += skips * size
        order, self.began = open_order(self.sampler, place, size if spec.pads_last else 0, again)
        begin, count = (0, size) if spec.reads_for_all else (spec.rank * share, share)
        full = (share,) * spec.world_size
        for items in order.rounds(size, begin, count):
            if spec.reads_for_all:
                for part, indices in spec.slices(GlobalBatch(place, full, full), items, share):
                    note(part)
                    yield indices
            else:
                note(GlobalBatch(place, full, full, items))
                yield items
            place += size
        left = order.rest()
        if left and not self.drop_last:
            round_ = spec.tail(place, share, len(left))
            if spec.pads_last:
                left += itertools.islice(itertools.cycle(order.head(size)), size - len(left))
            for part, indices in spec.slices(round_, left, share):
                note(part)
                yield indices
        order.close()

    def __len__(self) -> int:
        return self.batches() * (self.spec.world_size if self.spec.reads_for_all else 1)

    def batches(self) -> int:
        """This rank's batches in an epoch."""
        return self._rounds(0, self.skip)

    def left(self) -> int | None:
        """This rank's batches in the next iteration."""
        try:
            return self._rounds(self.start, self.skips)
        except TypeError:
            return None

    def _rounds(self, start: int, skips: int) -> int:
        total = len(self.sampler)
        if self.drop_last:
            total -= total % self.batch_size
        return max(0, self.spec.rounds(max(0, total - start), self.size, self.drop_last) - skips)

    def rounds_before(self, place: int) -> float:
        """How many rounds there are up to a place in the epoch."""
        return place / self.size

    def remainder(self, round_: GlobalBatch) -> int:
        """Real samples in the last round; 0 when it was full."""
        return sum(round_.real) % self.size

    def expected_remainder(self) -> int:
        """The same before anything was read."""
        return UNKNOWN if self.drop_last else _remainder(self.sampler, self.start, self.size)


class BatchSamplerShard(Shard, Sampler[Any]):
    """This rank's batches of any batch sampler, dealt whole: batches keep the size their sampler gave them.

    Also for a sampler whose samples are not batched at all. Where batches have a fixed size, only the very last one may
    be shorter, and is filled up as a plain sampler's would be.
    """

    def __init__(self, inner: Any, spec: ShardSpec, *, split: bool) -> None:
        self.inner = inner
        self.sampler = getattr(inner, "sampler", None)
        size = getattr(inner, "batch_size", None)
        self._fixed = size if isinstance(size, int) and not isinstance(size, bool) else None
        self.drop_last = self._fixed is not None and bool(getattr(inner, "drop_last", False))
        self.batch_size = size
        self._split = split
        if split:
            check_split(self._fixed, spec.world_size)
        self._prepare(spec)

    def __iter__(self) -> Iterator[Any]:
        place, skips, again = self._opening()
        spec = self.spec
        per_round = 1 if self._split else spec.world_size
        stream = iter(self._batches(again))
        head = list(itertools.islice(stream, spec.world_size)) if spec.pads_last else []
        stream = itertools.chain(head, stream)
        passed = 0
        while passed < place and (batch := next(stream, None)) is not None:
            passed += _rows(batch)
        passed += sum(_rows(batch) for batch in itertools.islice(stream, skips * per_round))
        batches = list(itertools.islice(stream, per_round))
        while batches:
            upcoming = list(itertools.islice(stream, per_round))
            if self.drop_last and len(batches) < per_round:
                return
            round_, parts = self._round(passed, batches, head, not upcoming)
            for part, batch in spec.parts(round_, parts):
                self.pending.append(part)
                yield batch
            passed = round_.end
            batches = upcoming

    def _batches(self, again: Tensor | None) -> Iterable[Any]:
        generator = getattr(self.sampler, "generator", None) or getattr(self.inner, "generator", None)
        if generator is None:
            batches, self.began = draw_globally(self.inner, again)
            return batches
        if again is not None:
            generator.set_state(again)
        self.began = generator.get_state()
        return self.inner

    def _round(self, place: int, batches: list[Any], head: list[Any], last: bool) -> tuple[GlobalBatch, list[Any]]:
        """What each rank gets of these batches."""
        world_size, pads_last = self.spec.world_size, self.spec.pads_last and last
        if self._split:
            return self._cut(place, batches[0], head[0] if head else [], last)
        parts = list(batches)
        real = [_rows(batch) for batch in parts]
        if pads_last and self._fixed is not None and real[-1] < self._fixed and not self.spec.pad_empty_ranks_only:
            filler = itertools.cycle([item for batch in head for item in batch])
            parts[-1] = [*parts[-1], *itertools.islice(filler, self._fixed - real[-1])]
        if pads_last:
            missing = world_size - len(parts)
            parts += [head[place % len(head)] for place in range(missing)]
            real += [0] * missing
        parts += [()] * (world_size - len(parts))
        real += [0] * (world_size - len(real))
        return GlobalBatch(place, tuple(_rows(part) for part in parts), tuple(real), size=self._fixed or 0), parts

    def _cut(self, place: int, batch: Sequence[Any], head: Sequence[Any], last: bool) -> tuple[GlobalBatch, list[Any]]:
        """One batch, a slice for each rank."""
        world_size = self.spec.world_size
        share, left = divmod(len(batch), world_size)
        if last and len(batch) < (self._fixed or 0):
            share = (self._fixed or 0) // world_size
            round_ = self.spec.tail(place, share, len(batch))
            items = [*batch]
            if self.spec.pads_last:
                items += itertools.islice(itertools.cycle(head), share * world_size - len(batch))
        elif left:
            raise DataError(
                f"split_batches=True: the batch sampler gave a batch of {len(batch)} samples in the middle of the "
                f"epoch ({name_samples(batch)}), which cannot be cut into {world_size} equal parts. Let it give "
                f"batches of a multiple of {world_size}, or leave split_batches out."
            )
        else:
            round_, items = GlobalBatch(place, (share,) * world_size, (share,) * world_size), [*batch]
        return round_, [items[rank * share : rank * share + round_.rows[rank]] for rank in range(world_size)]

    def __len__(self) -> int:
        return self.batches() * (self.spec.world_size if self.spec.reads_for_all else 1)

    def batches(self) -> int:
        """This rank's batches in an epoch."""
        batches = len(self.inner)
        if self._split:
            return max(0, batches - self.skip)
        return max(0, self.spec.rounds(batches, self.spec.world_size, self.drop_last) - self.skip)

    def remainder(self, round_: GlobalBatch) -> int:
        """Real samples in the last round; 0 when it was full."""
        size = (self._fixed or 0) * (1 if self._split else self.spec.world_size)
        full = all(round_.real) and round_.real == round_.rows and sum(round_.real) >= size
        return 0 if full else sum(round_.real)

    def expected_remainder(self) -> int:
        """The same before anything was read, where batches have the size that their sampler says."""
        if self.drop_last or self._fixed is None or not isinstance(self.inner, BatchSampler):
            return UNKNOWN
        return _remainder(self.sampler, self.start, self._fixed * (1 if self._split else self.spec.world_size))


def _remainder(order: Any, start: int, size: int) -> int:
    """What is left over of an order from ``start`` on, in rounds of this size; unknown without a length."""
    try:
        return max(0, len(order) - start) % size
    except TypeError:
        return UNKNOWN


def _rows(batch: Any) -> int:
    try:
        return len(batch)
    except TypeError:
        return 1  # one index, of a loader that does not batch


def _ids(part: Any) -> Sequence[Any]:
    if isinstance(part, Sequence):
        return part
    return part.tolist() if hasattr(part, "tolist") and _rows(part) != 1 else [part]


class ShardedIterable(Shard, IterableDataset[Any]):
    """This rank's items of an iterable data set. Whoever reads it reads the whole stream and keeps a part.

    In a worker process, each worker has a stream of its own, with rounds of its own. What several workers have left in
    the end is put together where the loader is (`worker_tails.py`).
    """

    def __init__(self, inner: Any, spec: ShardSpec, *, batch_size: int | None, drop_last: bool, split: bool) -> None:
        self.inner = inner
        self.sampler = None
        self.drop_last = drop_last
        self.share = check_split(batch_size, spec.world_size) if split else (batch_size or 1)
        self.starts: list[int] | None = None
        """Where each worker's stream begins in the next iteration, when that is not at its start."""
        self.counted_from: list[int] | None = None
        """The same when the data set goes there by itself."""
        self._prepare(spec)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__  # the base class has none, and __getattr__ below would ask the data set for one

    @property
    def size(self) -> int:
        """Items in a full round."""
        return self.share * self.spec.world_size

    def _step(self, workers: int) -> int:
        """Items that a worker deals out at a time: a round, or, read for all ranks by several workers, a batch."""
        return self.share if self.spec.reads_for_all and workers > 1 else self.size

    def places(self, workers: int) -> list[int]:
        """Where each worker's stream begins."""
        starts = self.counted_from or self.starts or [self.start] * workers
        skips = self.skips if workers == 1 else 0
        return [start + skips * self.size for start in starts]

    def batches_to_drop(self, workers: int) -> int:
        """Batches that are read before the first one that counts: those of several workers come in turn."""
        return self.skips * (self.spec.world_size if self.spec.reads_for_all else 1) if workers > 1 else 0

    def forget(self) -> None:
        """Begin the next iteration at its start."""
        super().forget()
        self.starts = self.counted_from = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        place, resumed = self.places(workers)[worker], self.counted_from is not None
        self._opening()
        spec, share, size = self.spec, self.share, self._step(workers)
        full = (share,) * (size // share)
        self.latest = GlobalBatch(
            place, full, full, range(place, place + size), worker
        )  # what is being read, should it fail
        order = IterOrder(self.inner, 0 if resumed else place, size if spec.pads_last else 0)
        for items in order.rounds(size, 0, size):
            round_ = GlobalBatch(place, full, full, worker=worker)
            for self.latest, places in spec.slices(round_, range(place, place + size), share):
                yield from items[places.start - place : places.stop - place]
            place += size
            self.latest = GlobalBatch(place, full, full, range(place, place + size), worker)
        left = order.rest()
        if left and workers > 1 and spec.world_size > 1:
            tail = pack(worker, place, left, order.head(size))
            if tail is not None:
                yield from [tail] * share  # a batch of them, which torch does not drop for being short
                return
        if left and size < self.size:  # a batch of a worker that reads for all
            self.latest = GlobalBatch(place, (len(left),), (len(left),), range(place, place + len(left)), worker, share)
            yield from left
        elif left and not self.drop_last:
            round_ = replace(spec.tail(place, share, len(left)), worker=worker)
            if spec.pads_last:
                left += itertools.islice(itertools.cycle(order.head(size)), size - len(left))
            for self.latest, places in spec.slices(round_, range(place, place + size), share):
                yield from left[places.start - place : places.stop - place]

    def __len__(self) -> int:
        return self.batches() * (self.size if self.spec.reads_for_all else self.share)

    def batches(self) -> int:
        """This rank's batches in an epoch."""
        return max(0, self.spec.rounds(len(self.inner), self.size, self.drop_last) - self.skip)

    def left(self) -> int | None:
        """This rank's batches in the next iteration."""
        return super().left() if self.starts is None and self.counted_from is None else None

    def rounds_before(self, place: int) -> float:
        """How many rounds there are up to a place in one worker's stream."""
        return place / self.size

    def expected_remainder(self) -> int:
        """Real items in the last round, before anything was read; each worker of several has a last one."""
        if self.drop_last or self.starts is not None or self.counted_from is not None:
            return UNKNOWN
        return _remainder(self.inner, self.start, self.size)

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set which epoch begins, if it wants to know."""
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)

    def remainder(self, round_: GlobalBatch) -> int:
        """Real items in the last round; 0 when it was full."""
        return sum(round_.real) % self.size

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)
