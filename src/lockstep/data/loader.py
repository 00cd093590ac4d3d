"""A prepared loader: this rank's share, on this rank's device, one batch ahead, and beside each batch what it holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.utils.data import DataLoader

from lockstep import current
from lockstep.blackbox.box import NoBox
from lockstep.data import loader_state
from lockstep.data.current_batch import CurrentBatch
from lockstep.data.epoch import Epoch
from lockstep.data.global_batch import GlobalBatch
from lockstep.data.iteration import Iteration
from lockstep.data.shards import UNKNOWN, Shard
from lockstep.errors import UsageError
from lockstep.process_group.group import Group
from lockstep.topology.data_parallel import DataParallelRanks
from lockstep.torch_internals.data_loader import forget_iterator

if TYPE_CHECKING:
    from lockstep.data.prefetcher import Mover


class DetachedGroup:
    """In the place of the group, in a process that is not the rank the loader was prepared in: it can only read."""

    clock = None
    scopes = 1  # a failure to read has nobody to be told to

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.box = NoBox()

    def check(self, doing: str) -> NoReturn:
        """Refuse what needs the other ranks."""
        raise UsageError(
            f"This loader was pickled in rank {self.rank} of {self.world_size} and unpickled in a process that is not "
            "this rank. Rank 0 reads its batches for all (dispatch_batches), so they only come in the ranks themselves."
        )


class PreparedDataLoader(DataLoader[Any]):
    """The user's loader, sharded. Attributes that are not its own are those of the loader it was made from."""

    def __init__(
        self,
        inner: DataLoader[Any],
        shard: Shard,
        group: Group,
        *,
        parallel: DataParallelRanks,
        dataset: Any,
        batches_before: int | None,
        total_batch_size: int | None,
        device: torch.device | None,
        non_blocking: bool,
        dispatched: bool,
        current_batch: CurrentBatch,
        synchronize: Callable[[Group, torch.Generator | None], None] | None,
        name: str = "",
        after_batch: Callable[[], None] | None = None,
    ) -> None:
        # The base class is for isinstance only: everything it would build is in ``inner``.
        self.inner = inner
        self.shard = shard
        self._spare = [(inner, shard)]
        """What the next iteration reads from; taken while one does."""
        self._group = group
        self._parallel = parallel
        """Who has which part of a batch."""
        self._dataset = dataset
        self.batches_before = batches_before
        """Batches of the loader before it was prepared; None when it does not know."""
        self._total_batch_size = total_batch_size
        self._mover: Mover | None = None
        """What brings batches to the device; None where there is nowhere to move to."""
        if device is not None and device.type != "cpu":
            from lockstep.data.prefetcher import Mover  # loaded where there is somewhere to move to

            self._mover = Mover(device, non_blocking)
        self.dispatched = dispatched
        """Whether rank 0 reads for all."""
        self._current_batch = current_batch
        """Where iterations report what they hand out."""
        self._synchronize = synchronize
        """Puts the generator of the order in step between ranks; None where there is nobody to be in step with."""
        self._name = name
        """The same on all ranks that have prepared this loader; empty where nobody is to compare with."""
        self._epoch = Epoch()
        self.after_batch = after_batch
        """Called when the script is done with a batch."""
        self.at_first_batch: Callable[[], None] | None = None
        """Called once, when the next iteration has its first batch ready, or knows that there is none."""
        self.is_copy = False
        """Whether it was copied from a prepared loader."""
        self.original: DataLoader[Any] | None = None
        """The user's loader, for another accelerator to prepare; None in a copy."""

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
        """How many epochs are over: iterations that came to their end."""
        return self._epoch.number

    @property
    def current(self) -> GlobalBatch | None:
        """What all ranks hold of the batch being worked on: the one that was drawn last."""
        shown = self._epoch.shown
        return None if shown is None else shown.round

    @property
    def remaining(self) -> int | None:
        """Batches left, the current one included; None when nobody knows."""
        newest = self._epoch.newest
        return None if newest is None else newest.remaining

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch being worked on is the last."""
        newest = self._epoch.newest
        return newest is not None and newest.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples in the last round: 0 when it is full, -1 while unknown."""
        shown = self._epoch.shown
        return UNKNOWN if shown is None else shown.remainder

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
        loader_state.set_epoch(self.inner, epoch)

    # --- where it is -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, for any number of processes to go on from."""
        return loader_state.save(self)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise where ``load_state_dict`` would, and change nothing."""
        loader_state.check(self, state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on where the state was taken: each sample that was left comes once."""
        loader_state.load(self, state)

    def skipping(self, batches: int) -> PreparedDataLoader:
        """The same loader without its first batches on every rank, which are not read.

        A place that was restored is in the same epoch, and the batches are counted from its start. It is used up: what
        follows the loader that is given back is the next epoch.
        """
        twin = copy.copy(self)
        twin.inner, twin.shard = loader_state.copy_loader(self.inner, self.shard)
        twin._spare = [(twin.inner, twin.shard)]
        twin.shard.skip += batches
        loader_state.rewind(twin.inner, twin.shard)
        return twin

    # --- copies ------------------------------------------------------------------------------------------------

    def __copy__(self) -> PreparedDataLoader:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedDataLoader:
        """A loader of its own in the same job: it begins at the start, or where this one's next iteration would."""
        twin = memo[id(self)] = copy.copy(self)
        twin.__dict__.update(copy.deepcopy(self._own_parts(), memo))
        twin._spare = [(twin.inner, twin.shard)]
        return twin

    def _own_parts(self) -> dict[str, Any]:
        inner = copy.copy(self.inner)
        forget_iterator(inner)  # worker processes stay where they are
        # The audit compares loaders by name, and this one takes part already.
        return {
            "inner": inner,
            "shard": self.shard,
            "_dataset": self._dataset,
            "_epoch": self._epoch,
            "_name": "",
            "is_copy": True,
            "original": None,
        }

    def __getstate__(self) -> dict[str, Any]:
        moved = None if self._mover is None else (self._mover.device, self._mover.non_blocking)
        here = {"_group": (self._group.rank, self._group.world_size), "_mover": moved}
        return {**self.__dict__, **self._own_parts(), **here, "_spare": (), "after_batch": None, "at_first_batch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._spare = [(self.inner, self.shard)]
        rank, world_size = state["_group"]
        session = current.peek()
        if session is not None and (session.topology.rank, session.topology.world_size) == (rank, world_size):
            self._group = session.group
        else:
            self._group = cast(Group, DetachedGroup(rank, world_size))
            self._synchronize = None
        if state["_mover"] is not None:
            from lockstep.data.prefetcher import Mover  # loaded where there is somewhere to move to

            self._mover = Mover(*state["_mover"])

    # --- iterating ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return Iteration(self).batches()

    def borrow(self) -> tuple[DataLoader[Any], Shard]:
        """What an iteration reads from: nobody else does until it is given back."""
        try:
            return self._spare.pop()
        except IndexError:
            return loader_state.copy_loader(self.inner, self.shard)

    def give_back(self, inner: DataLoader[Any], shard: Shard) -> None:
        """An iteration has ended; a copy that was made for it is not needed any more."""
        if shard is self.shard:
            self._spare.append((inner, shard))

    def be_ready(self) -> None:
        """Do what was to be done when the first batch is there."""
        if self.at_first_batch is not None:
            ready, self.at_first_batch = self.at_first_batch, None
            ready()
