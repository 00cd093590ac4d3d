"""What was read goes into the objects: first what may refuse its state, so that all can still be undone, then the rest.

Optimizers and schedulers are given their states, and loaders are asked about theirs, before any weight changes. What
users have registered comes after the models, as in Accelerate; where its state does not look like the one it has now,
the weights are kept until it has taken it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.checkpoint import generators, safe_pickle
from lockstep.checkpoint.state import SCALER, LoadedState, Objects, numbered_name
from lockstep.errors import CheckpointError, LockstepError
from lockstep.model_files.shared_tensors import stored_bytes, view_key

_CHEAP = 1 << 28
"""Bytes of weights that are kept in any case when something else might still refuse its state."""


class Restoring:
    """One load, from the first object that is changed to the last."""

    def __init__(self, folder: Path, loaded: LoadedState, objects: Objects) -> None:
        self._folder, self._loaded, self._objects = folder, loaded, objects
        self._undo: list[Callable[[], Any]] = []
        self.kept = False
        """Whether ``undo`` brings back the weights."""

    def begin(self) -> None:
        """What may refuse its state: optimizers, schedulers, the scaler, loaders."""
        loaded, objects = self._loaded, self._objects
        for number, (optimizer, value) in enumerate(zip(objects.optimizers, loaded.optimizers, strict=True)):
            self._undo.append(_undo_optimizer(optimizer))
            with self._named(numbered_name("optimizer", number, ".bin")):
                optimizer.load_state_dict(value)
        for number, (scheduler, value) in enumerate(zip(objects.schedulers, loaded.schedulers, strict=True)):
            self._load(scheduler, value, numbered_name("scheduler", number, ".bin"))
        if objects.scaler is not None:
            self._load(objects.scaler, loaded.scaler, SCALER)
        for number, value in loaded.loaders.items():
            with self._named(numbered_name("dl_state_dict", number, ".bin")):
                objects.loaders[number].check_state_dict(value)

    def keep_for_undo(self, models: list[nn.Module], *, doubtful: bool) -> None:
        """Have ``undo`` bring back the weights, where something may still refuse its state after they have changed."""
        custom = list(zip(self._objects.custom, self._loaded.custom, strict=True))
        weights = [value for model in models for value in model.state_dict(keep_vars=True).values()]
        weights = [value for value in weights if isinstance(value, Tensor) and not value.is_meta and not is_lazy(value)]
        size = sum(stored_bytes(value) for value in weights)
        unlike = any(_outline(_state_of(thing)) != _outline(value) for thing, value in custom)
        if doubtful or (custom and (unlike or size <= _CHEAP)):
            self.kept = True
            kept = {view_key(value): (value, value.detach().clone()) for value in weights}
            self._undo.append(lambda: _copy_back(list(kept.values())))

    def load_custom(self) -> None:
        """What users have registered."""
        for number, (thing, value) in enumerate(zip(self._objects.custom, self._loaded.custom, strict=True)):
            self._load(thing, value, f"custom_checkpoint_{number}.pkl")

    def finish(self) -> int | None:
        """What has been checked; the seed of this rank's generators if they had to be derived."""
        loaded, objects = self._loaded, self._objects
        for number, value in loaded.loaders.items():
            objects.loaders[number].load_state_dict(value)
        if loaded.counters is not None and loaded.trains:
            objects.window.load_state_dict({**loaded.counters["window"], "items": loaded.items})
        gradients = loaded.gradients or [None] * len(objects.parameters)
        objects.strategy.restore_window(objects.parameters, gradients)
        return _assign_generators(loaded, objects)

    def undo(self) -> None:
        """Give every object the state that it had."""
        for step in reversed(self._undo):
            with suppress(Exception):  # an object that takes no state, not even its own
                step()
        self._undo.clear()

    def _load(self, thing: Any, value: Any, name: str) -> None:
        before = _state_of(thing)
        if before is not None:
            self._undo.append(lambda: thing.load_state_dict(before))
        with self._named(name):
            thing.load_state_dict(value)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except LockstepError:
            raise
        except Exception as error:  # of the object itself, which may be anybody's
            raise CheckpointError(
                f"{self._folder / name} was refused by what it is for ({type(error).__name__}: {error})."
            ) from error


def _undo_optimizer(optimizer: Any) -> Callable[[], None]:
    """By the objects that it has: loading its own state once more would cast it to the dtype of the parameters."""
    inner = optimizer
    while "state" not in vars(inner) and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        before = _state_of(optimizer)
        return lambda: None if before is None else optimizer.load_state_dict(before)
    kept = {"state": inner.state, "param_groups": inner.param_groups}
    return lambda: vars(inner).update(kept)


def _state_of(thing: Any) -> Any:
    """A copy of an object's state; None where it has none to give yet, or one that is too large to be copied."""
    with suppress(Exception):  # what it is made of is its own affair
        state = thing.state_dict()
        if sum(stored_bytes(tensor) for tensor in safe_pickle.tensors(state)) <= _CHEAP:
            return copy.deepcopy(state)
    return None


@torch.no_grad()
def _copy_back(kept: list[tuple[Tensor, Tensor]]) -> None:
    for value, before in kept:
        value.copy_(before)


def _outline(value: Any) -> Any:
    """Names, kinds and shapes of a state, without its values."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: _outline(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_outline(item) for item in value]
    return type(value)


def _assign_generators(loaded: LoadedState, objects: Objects) -> int | None:
    """Last, as loading may draw numbers; and once more when the first batch is there, as an iterator draws some too."""
    if loaded.generators is None:
        return None
    if not loaded.known:
        return generators.derive(loaded.generators, objects.rank, objects.device)
    # An epoch that begins anew draws what it draws; one that is gone on with has drawn it before.
    states = loaded.generators
    going_on = [number for number, value in loaded.loaders.items() if value.get("begun") and not value.get("ended")]
    begun = [objects.loaders[number] for number in going_on]

    def again() -> None:
        for loader in begun:
            loader.at_first_batch = None
        generators.restore(states, objects.device)

    generators.restore(states, objects.device)
    for loader in begun:
        loader.at_first_batch = again
    return None
