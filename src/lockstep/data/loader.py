"""A prepared loader: this rank's share, on this rank's device, one batch ahead, and beside each batch what it holds."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from lockstep.comm.profiled import being_profiled
from lockstep.data import cursor
from lockstep.data.round import Round, name_samples
from lockstep.data.shards import UNKNOWN, Shard, ShardedIterable
from lockstep.data.taking import short_form, workers_of
from lockstep.errors import DataError
from lockstep.topology.group import Group

if TYPE_CHECKING:
    from lockstep.data.audit import Audit
    from lockstep.data.dispatch import Share
    from lockstep.data.mover import Mover

Item = tuple[Any, Round, bool]
"""A batch, its round, and whether it is this rank's last."""


class Epoch:
    """How often a loader has been iterated; shared with the loaders that skip some of its batches."""

    def __init__(self) -> None:
        self.number = 0
        self.audited = False


class PreparedDataLoader(DataLoader[Any]):
    """The user's loader, sharded. Attributes that are not its own are those of the loader it was made from."""

    def __init__(
        self,
        inner: DataLoader[Any],
        shard: Shard,
        group: Group,
        *,
        dataset: Any,
        batches_before: int | None,
        total_batch_size: int | None,
        device: torch.device | None,
        non_blocking: bool,
        dispatched: bool,
        open_loaders: list[Any],
        synchronize: Callable[[torch.Generator | None], None] | None,
        name: str = "",
    ) -> None:
        # The base class is for isinstance only: everything it would build is in ``inner``.
        self.inner = inner
        self.shard = shard
        self._group = group
        self._dataset = dataset
        self.batches_before = batches_before
        """Batches of the loader before it was prepared; None when it does not know."""
        self._total_batch_size = total_batch_size
        self._mover: Mover | None = None
        if device is not None and device.type != "cpu":
            from lockstep.data.mover import Mover  # loaded where there is somewhere to move to

            self._mover = Mover(device, non_blocking)
        self.dispatched = dispatched
        """Whether rank 0 reads for all."""
        self._open_loaders = open_loaders
        self._synchronize = synchronize
        self._name = name
        """The same on all ranks that have prepared this loader; empty where nobody is to compare with."""
        self._epoch = Epoch()
        self.turn = 0
        """Which batch of the epoch is being worked on, counted from 1."""
        self.current: Round | None = None
        """What all ranks hold of the batch being worked on."""
        self.places: list[int] | None = None
        """How far the epoch under way has been handed out, for each worker of a stream; None between epochs."""
        self.snapshot: Any = None
        """The state of a stateful inner loader after the batch being worked on."""
        self.end_of_dataloader = False
        """Whether the batch being worked on is the last."""
        self.remainder = UNKNOWN
        """Real samples in the last round: 0 when it is full, -1 while unknown."""
        self._left: int | None = None
        self.after_batch: Callable[[], None] | None = None
        """Called when the script is done with a batch."""
        self.at_first_batch: Callable[[], None] | None = None
        """Called once, when the next iteration has its first batch ready, or knows that there is none."""

    # --- what it is --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.shard.batches()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        return self._dataset

    @dataset.setter
    def dataset(self, value: Any) -> None:
        raise AttributeError("A prepared loader keeps its data set. Prepare a new loader for another one.")

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all ranks work on at a time."""
        return self._total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set."""
        return len(self._dataset)

    @property
    def even_batches(self) -> bool:
        """Whether samples are repeated at the end so that all ranks get equally many batches."""
        return self.shard.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.shard.even_batches = value

    @property
    def reads(self) -> bool:
        """Whether this rank reads data itself."""
        return not self.dispatched or self._group.rank == 0

    @property
    def iteration(self) -> int:
        """How often this loader has been iterated."""
        return self._epoch.number

    @property
    def remaining(self) -> int | None:
        """Batches left, the current one included; None when nobody knows."""
        return self._left

    @property
    def sample_ids(self) -> list[int]:
        """This rank's samples in the batch being worked on: indices, or places in the stream of an iterable."""
        return [] if self.current is None else list(self.current.ids)

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and data set which epoch comes next. A place to go on from belongs to its own epoch."""
        if epoch != self._epoch.number:
            self.shard.forget()
        self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Count epochs from here, and tell everything that wants to know."""
        self._epoch.number = epoch
        for part in cursor.parts(self.inner):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    # --- where it is -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, for any number of processes to go on from."""
        return cursor.save(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on where the state was taken: each sample that was left comes once."""
        cursor.load(self, state)

    def skipping(self, batches: int) -> PreparedDataLoader:
        """The same loader without its first batches on every rank, which are not read."""
        twin = copy.copy(self)
        twin.inner = copy.copy(self.inner)
        twin.inner.__dict__["_iterator"] = None
        twin.shard = cursor.replace_shard(twin.inner, self.shard)
        twin.shard.skip += batches
        twin.current = twin.places = None
        return twin

    # --- iterating ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._synchronize is not None:
            self._synchronize(cursor.shared_generator(self.inner))
        self._close()
        self._open_loaders.append(self)
        self.end_of_dataloader = False
        self.remainder = UNKNOWN
        self._left = self.shard.left()
        self.places = self.shard.places(max(1, self.inner.num_workers))
        if not self.reads:
            self.shard.forget()
        audit = self._audit()
        move = self._mover
        # What rank 0 hands out is waited for by the others: that says nothing about who is slow.
        clock = None if self.dispatched else self._group.clock
        box = self._group.box
        self.turn = 0
        asked = box.phase("data", site=True)
        try:
            for batch, round_, last in self._dispatched() if self.dispatched else self._ahead():
                self.turn += 1
                self.current = round_
                if audit is not None:
                    audit.saw(round_, self._group.rank)
                if last:
                    self.remainder = self.shard.remainder(round_)
                    self.end_of_dataloader = True
                if self.at_first_batch is not None:
                    self._be_ready()
                answered = box.phase("")
                if clock is not None and clock.on:
                    clock.fetches.append((asked, answered))
                yield batch if move is None else move.finish(batch)
                asked = box.phase("data", site=True)
                if self._left is not None:
                    self._left -= 1
                if self.after_batch is not None:
                    self.after_batch()
            self._be_ready()  # of an epoch that was saved at its end nothing is left
            self._epoch.number += 1
            self.places = None
            if audit is not None:
                self._epoch.audited = True
                audit.finish(self._group)
        finally:
            box.phase("")
            self._close()

    def _be_ready(self) -> None:
        if self.at_first_batch is not None:
            ready, self.at_first_batch = self.at_first_batch, None
            ready()

    def _ahead(self) -> Iterator[Item]:
        """This rank's batches; each is handed out when it is known whether another follows."""
        batches = self._read()
        start = self._mover.start if self._mover is not None else None
        try:
            batch, round_ = next(batches)
        except StopIteration:
            return
        snapshot = self.snapshot
        batch = batch if start is None else start(batch)
        places = self.places or [0]
        for following, next_round in batches:
            # On its way to the device while the one before it is computed on.
            following = following if start is None else start(following)
            ahead, self.snapshot = self.snapshot, snapshot
            places[round_.worker] = round_.end
            yield batch, round_, False
            batch, round_, snapshot = following, next_round, ahead
        self.snapshot = snapshot
        places[round_.worker] = round_.end
        yield batch, round_, True

    def _dispatched(self) -> Iterator[Item]:
        """What rank 0 reads for this rank."""
        from lockstep.data.dispatch import dispatch  # loaded where it is used, as not every script does

        rank, ranks = self._group.rank, self._group.world_size
        read: deque[tuple[Round, Any]] = deque()
        source = self._shares(read) if rank == 0 else None
        places = self.places or [0]
        start = self._mover.start if self._mover is not None else None
        deliveries = dispatch(self._group, source, even=self.even_batches)
        while True:
            try:
                batch, round_, last = next(deliveries)
            except StopIteration:
                return
            except Exception as error:
                self._tell(error, None)  # says nothing twice
                raise
            if len(places) == 1:
                places[0] = round_.end
            for part, self.snapshot in [read.popleft() for _ in range(min(ranks, len(read)))]:
                places[part.worker] = part.end  # what rank 0 has read, but not given out, does not count
            yield batch if start is None else start(batch), round_, last

    def _shares(self, read: deque[tuple[Round, Any]]) -> Iterator[Share]:
        from lockstep.data.dispatch import Share

        for batch, part in self._read():
            read.append((part, self.snapshot))
            yield Share(batch=batch, start=part.start, rows=part.rows[0], real=part.real[0], ids=part.ids)

    def _read(self) -> Iterator[tuple[Any, Round]]:
        """The batches that are read here, with their rounds; a failure is told to the other ranks."""
        shard, alone = self.shard, self._group.world_size == 1
        stream = isinstance(shard, ShardedIterable)
        stateful = stream and hasattr(self.inner, "state_dict")
        coming = shard.coming
        clock = None if self.dispatched else self._group.clock
        outside = None if clock is None else clock.workers
        try:
            batches = iter(self.inner)
            take = short_form(batches)
            if clock is not None:
                clock.workers = workers_of(batches)
            while True:
                try:
                    batch = next(batches) if take is None or being_profiled() else take()
                except StopIteration:
                    return
                if stream:
                    round_, batch = batch.round, batch.batch
                else:
                    round_ = coming.popleft()
                if batch is None and not alone:
                    raise DataError(
                        f"The loader gave None instead of a batch for {name_samples(round_.ids)}. On several "
                        "processes every rank needs its batch: let collate_fn always return one."
                    )
                if stateful:
                    self.snapshot = self.inner.state_dict()  # type: ignore[attr-defined]
                yield batch, round_
        except Exception as error:
            self._tell(error, shard.latest if stream else coming[0] if coming else None)
            raise
        finally:
            if clock is not None:
                clock.workers = outside  # of the loop around this one

    def _tell(self, error: Exception, round_: Round | None) -> None:
        from lockstep.data import failure  # loaded when something has failed

        failure.tell(error, self._group, round_)

    def _audit(self) -> Audit | None:
        fresh = not (self._epoch.audited or self.shard.skip or any(self.places or ()))
        if not self._name or self._group.world_size == 1 or not fresh or isinstance(self.shard, ShardedIterable):
            return None
        from lockstep.data.audit import Audit  # loaded where it is used: one process has nobody to compare with

        return Audit.of(self.inner, self._name, self._epoch.number)

    def _close(self) -> None:
        while any(loader is self for loader in self._open_loaders):
            place = next(place for place, loader in enumerate(self._open_loaders) if loader is self)
            del self._open_loaders[place]
        self.end_of_dataloader = False
