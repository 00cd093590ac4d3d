"""Making models, optimizers, schedulers and loaders ready."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lockstep.blackbox import sites
from lockstep.comm import rng
from lockstep.config.choices import RNGType
from lockstep.config.handlers import DataLoaderConfiguration
from lockstep.config.settings import Settings
from lockstep.data.loader import PreparedDataLoader
from lockstep.data.prepare import prepare_loader
from lockstep.errors import UsageError
from lockstep.optim.optimizer import PreparedOptimizer
from lockstep.optim.scheduler import PreparedScheduler
from lockstep.process_group.group import Group
from lockstep.strategies.unwrap import inner_model
from lockstep.training import announce, unwrap
from lockstep.training.compiling import compile_model
from lockstep.training.state import TrainingState

_OWNER = "_lockstep_owner"


Makers = Sequence[tuple[type, Callable[..., Any]]]
"""What prepares an object of each kind: an accelerator's methods, which a script may have overridden."""


def prepare(
    objects: Sequence[Any],
    device_placement: Sequence[bool | None] | None,
    makers: Makers,
    make_scheduler: Callable[[Any], PreparedScheduler],
) -> Any:
    """Called on: all ranks. Each object, ready, in the order given; what is of no known kind as it is."""
    places = [None] * len(objects) if device_placement is None else device_placement
    if len(places) != len(objects):
        raise UsageError(f"device_placement has {len(places)} entries for {len(objects)} objects. Give one for each.")
    made = []
    for item, place in zip(objects, places, strict=True):
        make = next((make for kind, make in makers if isinstance(item, kind)), None)
        made.append(item if make is None else make(item, device_placement=place))
    # Schedulers last: they follow the optimizers prepared with them.
    made = [make_scheduler(item) if isinstance(item, (LRScheduler, PreparedScheduler)) else item for item in made]
    return made[0] if len(made) == 1 else tuple(made)


class Preparer:
    """Adds to a training state what is prepared; ``after_batch`` is called when a script is done with a batch."""

    def __init__(self, state: TrainingState, settings: Settings, after_batch: Callable[[], None] | None = None) -> None:
        self._state, self._settings, self._after_batch = state, settings, after_batch

    def prepare_model(self, model: nn.Module, place: bool, evaluation_mode: bool) -> nn.Module:
        """Called on: all ranks. One model; with ``place``, moved to the device."""
        state = self._state
        earlier = self._find_prepared(model)
        if earlier is not None:
            if evaluation_mode:
                return model  # as it came: a model out of its wrapper computes alone
            if state.strategy.fits(earlier):
                return earlier
            model = state.strategy.unwrap(model)
        elif _OWNER in model.__dict__:  # of another accelerator, or from before free_memory()
            model = state.strategy.unwrap(model)
        before = dict(model.named_parameters(remove_duplicate=False))
        if unwrap.spans_devices(model):
            if state.topology.world_size > 1 and not evaluation_mode:
                raise UsageError(
                    "This model is spread over several devices or offloaded (hf_device_map, hooks), and each process "
                    "needs a whole one. Load it without device_map, or start one process."
                )
        elif place:
            model = model.to(state.topology.device)
        state.precision.wrap(model)
        if not evaluation_mode:
            model = state.strategy.wrap(model)
            state.strategy.rebind(before, model, state.optimizers)
        compile_model(model, self._settings.dynamo)
        model.__dict__[_OWNER] = state.number
        if earlier is None:
            state.models.append(model)
        else:
            state.replace_model(earlier, model)
        state.detectors.follow(model, trained=not evaluation_mode)
        state.monitor.follow(model, trained=not evaluation_mode)
        return model

    def _find_prepared(self, model: nn.Module) -> nn.Module | None:
        """What this accelerator has made of the same model before, or of one that ``torch.compile`` was put around."""
        state = self._state
        inner = state.strategy.unwrap(model)
        for prepared in state.models:
            if state.strategy.unwrap(prepared) is inner:
                return prepared
        same = (item for item in state.models if inner_model(item) is inner_model(model))
        return next((item for item in same if not state.strategy.fits(item)), None)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        """One optimizer."""
        state = self._state
        if isinstance(optimizer, PreparedOptimizer):
            if any(optimizer is prepared for prepared in state.optimizers):
                return optimizer
            optimizer = optimizer.optimizer  # of another accelerator, or from before free_memory()
        for prepared in state.optimizers:
            if prepared.optimizer is optimizer:
                return prepared
        made = PreparedOptimizer(
            optimizer,
            state.accumulation,
            state.scaler,
            functools.partial(announce.announce_run, state),
            state.monitor if state.monitor.guards else None,
            state.stepped,
            state.strategy.drop_held,
        )
        state.strategy.rebind_optimizer(optimizer)
        state.optimizers.append(made)
        for scheduler in state.schedulers:
            scheduler.adopt(made)
        return made

    def prepare_scheduler(self, scheduler: Any, split_batches: bool) -> PreparedScheduler:
        """One learning rate scheduler; where batches are split, it does not advance for each process."""
        state = self._state
        if isinstance(scheduler, PreparedScheduler):
            if any(scheduler is prepared for prepared in state.schedulers):
                return scheduler
            scheduler = scheduler.scheduler
        for prepared in state.schedulers:
            if prepared.scheduler is scheduler:
                return prepared
        made = PreparedScheduler(
            scheduler,
            state.optimizers,
            state.accumulation,
            with_optimizer=self._settings.step_with_optimizer,
            unit=self._settings.scheduler_unit,
            processes=1 if split_batches else state.strategy.data_parallel.size,
            announce=functools.partial(announce.announce_horizon, state, self._settings),
        )
        state.schedulers.append(made)
        return made

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], options: DataLoaderConfiguration, place: bool, slice_fn_for_dispatch: Any
    ) -> PreparedDataLoader:
        """Called on: all ranks. This rank's share of a loader; with ``place``, on the device."""
        state = self._state
        if slice_fn_for_dispatch is not None:
            raise UsageError(
                "slice_fn_for_dispatch has nothing to do here: rank 0 reads a batch of its own for every rank, so that "
                "no batch is ever sliced. Leave it out."
            )
        if isinstance(data_loader, PreparedDataLoader):
            if data_loader.is_copy and data_loader._current_batch is state.current_batch:
                if not any(data_loader is other for other in state.loaders):
                    state.loaders.append(data_loader)
                return data_loader
            if any(data_loader._epoch is other._epoch for other in state.loaders):
                return data_loader  # itself, or without its first batches
            if data_loader.original is None:
                raise UsageError(
                    "This loader is a copy of one that another Accelerator has prepared, or that was prepared before "
                    "free_memory(). Pass the original DataLoader."
                )
            data_loader = data_loader.original
        if options.use_seedable_sampler and options.data_seed is None:
            # Seeds may differ between ranks; the order may not.
            seed = self._shared_seed(sys._getframe())
            options = dataclasses.replace(options, data_seed=seed)
        made = prepare_loader(
            data_loader,
            state.group,
            options,
            device=state.topology.device if place else None,
            current_batch=state.current_batch,
            synchronize=functools.partial(_synchronize, self._settings.rng_types, state.topology.device),
            own_generator=RNGType.GENERATOR in self._settings.rng_types,
            pad_empty_ranks_only=self._settings.reproducible,
            name=self._name_loader(sys._getframe()) if state.topology.world_size > 1 else "",
            after_batch=self._after_batch,
            data_parallel=state.strategy.data_parallel,
        )
        made.original = data_loader
        state.loaders.append(made)
        return made

    def _shared_seed(self, frame: FrameType) -> int:
        """The seed of the first rank that prepares this loader: the same on all, and nobody waits for it."""
        state = self._state
        mine = str(torch.initial_seed() % 2**31)
        if state.topology.world_size == 1:
            return int(mine)
        lines = f"seed < {sites.spell_path(frame)}"
        key = hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
        group = state.group
        seed: int = group.store.claim(group.key(f"seed/{key}/{group.ordinal(key)}"), mine, int)
        return seed

    def _name_loader(self, frame: FrameType) -> str:
        """A name that other ranks give to the same loader: by the lines that led here, and how often they have.

        Ranks may prepare loaders that others do not have, so counting all of them would not do.
        """
        lines = hashlib.blake2b(sites.spell_path(frame).encode(), digest_size=16).hexdigest()
        return f"{lines}/{self._state.group.ordinal(lines)}"


def _synchronize(
    kinds: Sequence[RNGType], device: torch.device, group: Group, generator: torch.Generator | None
) -> None:
    """Called on: all ranks. At the start of an iteration; knows nothing that cannot be pickled with its loader."""
    wanted = [kind for kind in kinds if kind is not RNGType.GENERATOR or generator is not None]
    rng.synchronize(group, device, wanted, generator)
