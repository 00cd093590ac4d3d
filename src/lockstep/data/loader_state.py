"""Where a loader stands: one place in the epoch's order, from which any number of processes can go on."""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from lockstep.data.sampler import SeedableRandomSampler
from lockstep.data.shards import Shard, ShardedIterable
from lockstep.data.tagged_batch import Tagging
from lockstep.errors import DataError
from lockstep.torch_internals.data_loader import forget_iterator

if TYPE_CHECKING:
    from lockstep.data.loader import PreparedDataLoader

_VERSION = 1


def save(loader: PreparedDataLoader) -> dict[str, Any]:
    """Where the loader stands: in the iteration that is trained on, or at the next one's beginning."""
    shard, generator, epoch = loader.shard, sampler_generator(loader.inner), loader._epoch
    iteration, pending = epoch.place(loader._current_batch.trains), shard.again is not None
    begun, waiting = iteration is not None, False
    batches, snapshot = shard.restored, None
    seedable = _seedable(loader.inner)
    if iteration is None:
        places, state = shard.places(max(1, loader.inner.num_workers)), shard.again
        if not pending and generator is not None:
            state = generator.get_state()
    else:
        # Of a loader that is trained on, a batch that was not is one that the training has still to come to: that of a
        # loop that was left at the top of its body, and of a state that is saved there. One that was skipped is passed
        # when the next is drawn.
        untouched = epoch.trains and not iteration.trained
        waiting = loader._current_batch.awaits_training(iteration)
        places = iteration.start if untouched else iteration.places_before if waiting else iteration.places
        places, state = list(places), iteration.began
        batches = iteration.passed + (0 if untouched else iteration.turn - waiting)
        snapshot = None if untouched else iteration.snapshot_before if waiting else iteration.snapshot
    return {
        "version": _VERSION,
        "epoch": loader.iteration if iteration is None else iteration.number,
        "places": places,
        "batches": batches,
        "ended": iteration is not None and iteration.end_of_dataloader and not waiting,
        "length": length_of(loader.dataset),
        "generator": None if state is None else state.clone(),
        "begun": begun or pending,
        "reads": loader.reads,
        "owns_generator": generator is not None,
        "seed": None if seedable is None else seedable.seed,
        "sampler_epoch": None if seedable is None else seedable.epoch if iteration is None else iteration.began_epoch,
        "world_size": loader._parallel.size,
        "inner": snapshot,
    }


def check(loader: PreparedDataLoader, state: dict[str, Any]) -> None:
    """Raise where the loader cannot go on from a state; nothing has changed then."""
    if state.get("version") != _VERSION:
        raise DataError(
            f"This is no state of a prepared loader (version {state.get('version')!r}, expected {_VERSION}). "
            "Pass what its state_dict() gave."
        )
    # A rank that is only given batches needs to know no more than how far it is.
    if state["begun"] and not state["reads"] and loader.reads:
        raise DataError(
            "This state was taken in the middle of an epoch on a rank that does not read the data itself "
            "(dispatch_batches). Load the one that rank 0 gave."
        )
    shard, places, ended = loader.shard, list(state["places"]), bool(state.get("ended"))
    length = length_of(loader.dataset)
    if any(places) and not ended and None not in (length, state["length"]) and length != state["length"]:
        raise DataError(
            f"The state was taken in the middle of an epoch of {state['length']} samples; this data set has {length}. "
            "Going on would lose or repeat samples: load the same data, or start with a new epoch."
        )
    workers = max(1, loader.inner.num_workers)
    streams = isinstance(shard, ShardedIterable) and loader.reads and any(places) and not ended
    if streams and len(places) != workers and not _resumes_itself(loader, state):
        raise DataError(
            f"The state of this iterable data set was taken with {len(places)} worker(s), each with a stream of its "
            f"own; this loader has {workers}. Use the same num_workers."
        )


def load(loader: PreparedDataLoader, state: dict[str, Any]) -> None:
    """Have the next iteration go on where the state was taken."""
    check(loader, state)
    shard, places, ended = loader.shard, list(state["places"]), bool(state.get("ended"))
    shard.forget()
    seedable = _seedable(loader.inner)
    if seedable is not None and state["seed"] is not None:
        seedable.seed, seedable.epoch = state["seed"], state["sampler_epoch"]
    elif seedable is None and state["generator"] is not None:
        if state["owns_generator"]:
            own_generator(loader.inner)  # so that the epochs to come follow from it too
        generator = sampler_generator(loader.inner)
        if state["begun"]:
            shard.again = state["generator"].clone()
        elif generator is not None:
            generator.set_state(state["generator"])
    if not isinstance(shard, ShardedIterable):
        shard.start = places[0] if places else 0
    if ended:
        _pass_over(loader, shard)
        places = [0] * len(places)
    loader.begin_epoch(state["epoch"] + ended)
    if isinstance(shard, ShardedIterable):
        _place_stream(loader, shard, places, state)
    if any(places):
        same = state["world_size"] == loader._parallel.size
        shard.resumes = True
        shard.restored = state.get("batches") if same else shard.rounds_before(sum(places))
    # Workers that are kept from one epoch to the next have their own copy of where to begin.
    forget_iterator(loader.inner)
    loader._epoch.restored()


def _pass_over(loader: PreparedDataLoader, shard: Shard) -> None:
    """Leave an epoch of which all was handed out: its order is drawn once more, so that the next one follows."""
    # In a copy, as an iteration of this loader may be open.
    _, passed = copy_loader(loader.inner, shard)
    if loader.reads and not isinstance(passed, ShardedIterable) and _seedable(loader.inner) is None:
        for _ in passed:  # type: ignore[attr-defined]
            pass


def _place_stream(loader: PreparedDataLoader, shard: ShardedIterable, places: list[int], state: dict[str, Any]) -> None:
    if not loader.reads:
        return
    if _resumes_itself(loader, state):
        if any(places):
            loader.inner.load_state_dict(state["inner"])  # type: ignore[attr-defined]
            shard.counted_from = places
        elif loader.inner.num_workers == 0:
            # The epoch is over; what the data set keeps from one to the next is put into it here. Workers begin anew.
            loader.inner.load_state_dict(state["inner"])  # type: ignore[attr-defined]
            iter(loader.inner)
        return
    if any(places):
        shard.starts = places


def _resumes_itself(loader: PreparedDataLoader, state: dict[str, Any]) -> bool:
    """Whether torchdata's loader has said where it stood, and can be told."""
    same = state["inner"] is not None and state["world_size"] == loader._parallel.size
    return same and _stateful(loader.inner)


def _stateful(inner: DataLoader[Any]) -> bool:
    return hasattr(inner, "load_state_dict")


def length_of(dataset: Any) -> int | None:
    """Samples in a dataset; None when it does not know."""
    try:
        return len(dataset)
    except TypeError:
        return None


def _seedable(inner: DataLoader[Any]) -> SeedableRandomSampler | None:
    return next((part for part in parts(inner) if isinstance(part, SeedableRandomSampler)), None)


def own_generator(inner: DataLoader[Any]) -> None:
    """Give a shuffling sampler a generator that can be put in step between ranks."""
    for part in parts(inner)[:-1]:  # the samplers; a data set's generator is its own
        if not isinstance(part, Shard) and getattr(part, "generator", part) is None:
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
            part.generator = generator


def sampler_generator(inner: DataLoader[Any]) -> torch.Generator | None:
    """The generator that decides the order, if there is one."""
    return _generator(parts(inner))


def shared_generator(inner: DataLoader[Any]) -> torch.Generator | None:
    """The generator that must be in step between ranks when an epoch begins, if there is one.

    A seedable sampler sets its own from the seed; an indexed dataset's has nothing to do with the order.
    """
    if _seedable(inner) is not None:
        return None
    *samplers, dataset = parts(inner)
    return _generator([*samplers, dataset] if isinstance(dataset, ShardedIterable) else samplers)


def _generator(parts: list[Any]) -> torch.Generator | None:
    for part in parts:
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def parts(inner: DataLoader[Any]) -> list[Any]:
    """What takes part in deciding the order: samplers, outermost first, then the data set."""
    found: list[Any] = []
    pending: list[Any] = [inner.batch_sampler, inner.sampler]
    while pending:
        part, *pending = pending
        if part is None or any(part is other for other in found):
            continue
        found.append(part)
        pending = [*pending, getattr(part, "inner", None), getattr(part, "sampler", None)]
    return [*found, inner.dataset]


def set_epoch(inner: DataLoader[Any], epoch: int) -> None:
    """Tell samplers and data set which epoch begins, if they want to know: an iteration left early did not count."""
    for part in parts(inner):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def rewind(inner: DataLoader[Any], shard: Shard) -> None:
    """Count what is skipped from the start of the epoch whose place was restored."""
    if not shard.resumes:
        return
    restored, skipped = shard.restored, shard.skip
    if restored is not None and restored != skipped:
        from lockstep.logging import get_notices  # loaded where it is used: there is seldom anything to log

        get_notices("lockstep.data").info(
            f"skip_first_batches: {skipped} batches are skipped from the start of the epoch; the state that was loaded "
            f"is from after {restored:g}. Without skip_first_batches the loader resumes from there by itself."
        )
    if isinstance(shard, ShardedIterable):
        if shard.counted_from is not None and restored == skipped:
            return  # the data set goes there by itself
        shard.starts = shard.counted_from = None
        _forget_inner_state(inner)
    shard.start, shard.resumes, shard.restored = 0, False, None


def _forget_inner_state(inner: DataLoader[Any]) -> None:
    if _stateful(inner):
        inner.__dict__["next_iter_state"] = None  # torchdata's; it cannot be told to begin at the start


def copy_loader(inner: DataLoader[Any], shard: Shard) -> tuple[DataLoader[Any], Shard]:
    """A copy that takes over where to begin; neither shares with the other what it is reading."""
    fresh = copy.copy(inner)
    forget_iterator(fresh)
    copied = _replace_shard(fresh, shard)
    _forget_inner_state(inner)
    shard.forget()
    return fresh, copied


def _replace_shard(inner: DataLoader[Any], shard: Shard) -> Shard:
    """Put a copy of the shard in its place in a copied loader."""
    fresh = copy.copy(shard)
    fresh.pending = deque()
    for name in ("batch_sampler", "sampler", "dataset"):
        if getattr(inner, name) is shard:
            inner.__dict__[name] = fresh
    if isinstance(fresh, ShardedIterable):
        tagging: Any = inner.collate_fn
        inner.__dict__["collate_fn"] = Tagging(fresh, tagging.collate)
    return fresh
