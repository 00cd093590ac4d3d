"""One iteration of a prepared loader: its own place, its own end, and beside each batch what all ranks hold of it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.data import loader_state
from lockstep.data.global_batch import GlobalBatch, ItemCounts, name_samples
from lockstep.data.shards import UNKNOWN, Shard, ShardedIterable
from lockstep.data.worker_tails import WorkerTail, distribute, whole_rounds
from lockstep.errors import DataError
from lockstep.torch_internals.data_loader import busy_share

if TYPE_CHECKING:
    from lockstep.data.audit import Audit
    from lockstep.data.dispatch import RankBatch
    from lockstep.data.loader import PreparedDataLoader

Item = tuple[Any, GlobalBatch, bool]
"""A batch, its round, and whether it is this rank's last."""


class Iteration:
    """From the first batch that is drawn to the last, or until it is left.

    What it knows of itself is about the batch that it has handed out. Several of one loader do not share anything.
    """

    def __init__(self, loader: PreparedDataLoader) -> None:
        self._held: PreparedDataLoader | None = loader  # until its end: the loader may show it, and would not be freed
        self._loader = weakref.ref(loader)
        self.epoch = loader._epoch
        self.number = 0
        """The epoch it began in."""
        self.turn = 0
        """Which of its batches is being worked on, counted from 1."""
        self.passed = 0
        """Batches of the epoch that it does not hand out, as they were skipped or trained on before."""
        self.round: GlobalBatch | None = None
        """What all ranks hold of the batch being worked on."""
        self.item_counts = ItemCounts()
        """What metrics have shown of the items per sample."""
        self.start: list[int] = []
        """Where in the epoch it began, for each worker of a stream."""
        self.places: list[int] = []
        """How far it has handed out, for each worker of a stream."""
        self.snapshot: Any = None
        """The state of a stateful inner loader after the batch being worked on."""
        self.places_before: list[int] = []
        self.snapshot_before: Any = None
        """The same before that batch, for a state that is taken when nobody has trained on it yet."""
        self._read_state: Any = None
        """The same after the batch that was read last: one ahead."""
        self.began: Tensor | None = None
        """The state of the order's generator when the epoch began."""
        self.began_epoch = 0
        """The sampler's own count of epochs then."""
        self.end_of_dataloader = False
        """Whether the batch being worked on is the last."""
        self.remainder = UNKNOWN
        """Real samples in the last round: 0 when it is full, -1 while unknown."""
        self.remaining: int | None = None
        """Batches left, the current one included; None when nobody knows."""
        self.begun_at = self.drawn_at = 0
        """When it drew first and last, in draws of all loaders."""
        self.trained = False
        """Whether a batch of it has been trained on."""
        self.superseded = False
        """Whether a state was loaded meanwhile, so that it does not say any more where the loader stands."""
        self.busy: Callable[[], float] | None = None
        """What gives the share of its worker processes that are busy."""

    @property
    def loader(self) -> Any:
        """Whose iteration it is; None when that is gone. Another thread may end it while this one asks."""
        return self._loader()

    def is_after(self, other: Iteration) -> bool:
        """Whether it began after the other one's last batch."""
        return self.begun_at > other.drawn_at

    def batches(self) -> Iterator[Any]:
        """The batches, on their device. Nothing is done before the first of them is drawn."""
        loader, epoch, group = self.loader, self.epoch, self.loader._group
        if loader._synchronize is not None:
            loader._synchronize(loader._group, loader_state.shared_generator(loader.inner))
        inner, shard = loader.borrow()
        self._begin(inner, shard)
        audit = self._audit(inner, shard)
        current, mover, box = loader._current_batch, loader._mover, group.box
        # What rank 0 hands out is waited for by the others: that says nothing about who is slow.
        clock = None if loader.dispatched else group.clock
        exhausted, repeated = False, 0
        asked = box.phase("data", site=True)
        try:
            source = self._dispatched(inner, shard) if loader.dispatched else self._ahead(inner, shard)
            for batch, round_, last in source:
                self.turn += 1
                self.round = round_
                if round_.real != round_.rows:
                    repeated += sum(round_.rows) - sum(round_.real)
                if last:
                    self.end_of_dataloader = True
                    if self.remainder == UNKNOWN:
                        self.remainder = shard.remainder(round_)
                    self._report_stream(inner, shard, repeated)
                current.drew(self)
                if audit is not None:
                    audit.saw(round_, loader._parallel.rank)
                if loader.at_first_batch is not None:
                    loader.be_ready()
                answered = box.phase("")
                if clock is not None and clock.on:
                    clock.fetches.append((asked, answered))
                yield batch if mover is None else mover.finish(batch)
                asked = box.phase("data", site=True)
                if self.remaining is not None:
                    self.remaining -= 1
                if loader.after_batch is not None:
                    loader.after_batch()
            loader.be_ready()  # where there was nothing to hand out
            exhausted = True
            if audit is not None:
                epoch.audited = True
                audit.finish(group, loader._parallel)
        finally:
            # One that is collected late does not end the phase of what has begun since.
            if current.newest in (self, None):
                box.phase("")
            self._end(loader, inner, shard, exhausted)

    def _begin(self, inner: DataLoader[Any], shard: Shard) -> None:
        loader = self.loader
        self.epoch.begins(self)
        loader_state.set_epoch(inner, self.number)
        self.remaining, self.remainder = shard.left(), shard.expected_remainder()
        self.passed = int(shard.restored or 0) if shard.resumes else shard.skip
        self.start = shard.places(max(1, inner.num_workers))
        self.places = list(self.start)
        if not loader.reads:
            shard.forget()

    def _end(self, loader: Any, inner: DataLoader[Any], shard: Shard, exhausted: bool) -> None:
        # Handed in: of a loader and an iteration that are collected together, ``self.loader`` is None already.
        current, clock = loader._current_batch, loader._group.clock
        current.ended(self)
        self.epoch.ends(self, exhausted)
        loader.give_back(inner, shard)
        if clock is not None and clock.workers is self.busy:
            clock.workers = None if current.newest is None else current.newest.busy
        self.busy = None
        self._held = None

    # --- where batches come from -------------------------------------------------------------------------------

    def _ahead(self, inner: DataLoader[Any], shard: Shard) -> Iterator[Item]:
        """This rank's batches; each is handed out when it is known whether another follows."""
        batches = self._read(inner, shard)
        start = self.loader._mover.start if self.loader._mover is not None else None
        try:
            batch, round_ = next(batches)
        except StopIteration:
            return
        self.began, self.began_epoch, snapshot = shard.began, shard.began_epoch, self._read_state
        batch = batch if start is None else start(batch)
        places = self.places
        if round_.ends is None:
            self.start[round_.worker] = round_.start
        for following, next_round in batches:
            # On its way to the device while the one before it is computed on.
            following = following if start is None else start(following)
            self._hand_out(snapshot)
            round_.pass_on(places)
            yield batch, round_, False
            batch, round_, snapshot = following, next_round, self._read_state
        self._hand_out(self._read_state)
        round_.pass_on(places)
        yield batch, round_, True

    def _hand_out(self, snapshot: Any) -> None:
        self.places_before, self.snapshot_before, self.snapshot = list(self.places), self.snapshot, snapshot

    def _dispatched(self, inner: DataLoader[Any], shard: Shard) -> Iterator[Item]:
        """What rank 0 reads for this rank."""
        from lockstep.data.dispatch import dispatch  # loaded where it is used, as not every script does

        loader, group, places = self.loader, self.loader._group, self.places
        read: deque[tuple[GlobalBatch, Any]] = deque()
        source = self._shares(inner, shard, read) if group.rank == 0 else None
        start = loader._mover.start if loader._mover is not None else None
        deliveries = dispatch(group, source, even=loader.even_batches, parts=loader._parallel.parts)
        while True:
            try:
                batch, round_, last = next(deliveries)
            except StopIteration:
                return
            except Exception as error:
                self._annotate_error(error, None)  # says nothing twice
                raise
            self._hand_out(self.snapshot)
            if len(places) == 1:
                self.start[0] = self.start[0] if self.turn else round_.start
                places[0] = round_.end
            for part, self.snapshot in [read.popleft() for _ in range(min(loader._parallel.size, len(read)))]:
                part.pass_on(places)  # what rank 0 has read, but not given out, does not count
            if last:
                self.snapshot = self._read_state
            yield batch if start is None else start(batch), round_, last

    def _shares(
        self, inner: DataLoader[Any], shard: Shard, read: deque[tuple[GlobalBatch, Any]]
    ) -> Iterator[RankBatch]:
        from lockstep.data.dispatch import RankBatch

        found: Iterator[Any] = ((batch, part, self._read_state) for batch, part in self._read(inner, shard))
        if isinstance(shard, ShardedIterable) and shard.drop_last:
            found = whole_rounds(found, self.loader._parallel.size)
        for batch, part, state in found:
            self.began, self.began_epoch = shard.began, shard.began_epoch
            read.append((part, state))
            yield RankBatch(
                batch=batch, start=part.start, rows=part.rows[0], real=part.real[0], ids=part.ids, size=part.size
            )

    def _read(self, inner: DataLoader[Any], shard: Shard) -> Iterator[tuple[Any, GlobalBatch]]:
        """The batches that are read here, with their rounds; a failure is reported to the other ranks."""
        group = self.loader._group
        stream = isinstance(shard, ShardedIterable)
        stateful = stream and hasattr(inner, "state_dict")
        pending = shard.pending
        drops = shard.batches_to_drop(inner.num_workers) if isinstance(shard, ShardedIterable) else 0
        tails: list[WorkerTail] = []
        batches: Any = None
        try:
            batches = iter(inner)
            if stream and inner.num_workers:
                shard.forget()  # the workers have copies, and know where to begin
            if group.clock is not None and not self.loader.dispatched:
                group.clock.workers = self.busy = busy_share(batches)
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                if stream:
                    round_, batch = batch.round, batch.batch
                    if isinstance(batch, WorkerTail):
                        tails.append(batch)
                        continue
                else:
                    round_ = pending.popleft()
                if batch is None and group.world_size > 1:
                    raise _no_batch(round_)
                if stateful:
                    # Of a worker that has sent its tail, only its place tells how far it is.
                    self._read_state = None if tails else inner.state_dict()  # type: ignore[attr-defined]
                if drops:
                    drops -= 1
                    self._drop(round_)
                    continue
                yield batch, round_
            if stateful:
                self._read_state = None if tails else inner.state_dict()  # type: ignore[attr-defined]
            if isinstance(shard, ShardedIterable) and tails:
                yield from self._tail(inner, shard, tails, drops)
        except Exception as error:
            raised = self._named(error, batches)
            self._annotate_error(raised, shard.latest if stream else pending[0] if pending else None)
            if raised is error:
                raise
            raise raised from error

    def _named(self, error: Exception, batches: Any) -> Exception:
        from lockstep.data import read_errors  # loaded when something has failed

        return read_errors.of_lost_worker(error, batches)

    def _tail(
        self, inner: DataLoader[Any], shard: ShardedIterable, tails: list[WorkerTail], drops: int
    ) -> Iterator[tuple[Any, GlobalBatch]]:
        """What several workers have left, put together."""
        collate: Any = inner.collate_fn
        batched = inner.batch_size is not None
        for number, (batch, round_) in enumerate(distribute(shard, tails, collate.collate, batched=batched)):
            if batch is None:
                raise _no_batch(round_)
            if number < drops:
                self._drop(round_)
            else:
                yield batch, round_

    def _drop(self, round_: GlobalBatch) -> None:
        """A batch that is skipped could only be skipped once it was read."""
        round_.pass_on(self.start)
        round_.pass_on(self.places)

    def _annotate_error(self, error: Exception, round_: GlobalBatch | None) -> None:
        from lockstep.data import read_errors  # loaded when something has failed

        read_errors.annotate_error(error, self.loader._group, round_)

    def _audit(self, inner: DataLoader[Any], shard: Shard) -> Audit | None:
        fresh = not (self.epoch.audited or shard.skip or any(self.start))
        name, alone = self.loader._name, self.loader._group.world_size == 1
        if not name or alone or not fresh or isinstance(shard, ShardedIterable):
            return None
        from lockstep.data.audit import Audit  # loaded where it is used: one process has nobody to compare with

        return Audit.of(inner, name, self.number)

    def _report_stream(self, inner: DataLoader[Any], shard: Shard, repeated: int) -> None:
        """Log, once, how many samples of a stream were repeated, and whether each worker has read all of it."""
        if self.loader._group.rank != 0 or self.epoch.audited or not isinstance(shard, ShardedIterable):
            return
        from lockstep.data.audit import log_stream  # loaded where it is used, as not every script has a stream

        self.epoch.audited = True
        log_stream(repeated, sum(self.places), loader_state.length_of(self.loader.dataset), inner.num_workers)


def _no_batch(round_: GlobalBatch) -> DataError:
    return DataError(
        f"The loader gave None instead of a batch for {name_samples(round_.ids)}. On several processes every rank "
        "needs its batch: let collate_fn always return one."
    )
