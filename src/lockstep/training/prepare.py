"""Making what a script trains with ready, and telling how the run is set up, as methods of an accelerator."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lockstep.blackbox import sites
from lockstep.checkpoint.checkpoint_methods import StateMethods
from lockstep.comm import rng
from lockstep.comm.process_info import ProcessView
from lockstep.config.choices import RNGType, SchedulerUnit
from lockstep.config.settings import Settings
from lockstep.data.current_batch import CurrentBatch
from lockstep.data.loader import PreparedDataLoader
from lockstep.data.options import DataOptions
from lockstep.data.prepare import prepare_loader, skip_first_batches
from lockstep.errors import UsageError
from lockstep.memory.memory_methods import MemoryMethods
from lockstep.numerics.monitor_methods import MonitorMethods
from lockstep.optim import schedule_length
from lockstep.optim.accumulation import Accumulation
from lockstep.optim.optimizer import PreparedOptimizer
from lockstep.optim.scheduler import PreparedScheduler
from lockstep.precision.mixed import Precision
from lockstep.precision.scaler import LossScaler
from lockstep.strategies.choose import Strategy
from lockstep.strategies.unwrap import inner_model
from lockstep.topology.memory import empty_cache
from lockstep.training import unwrap
from lockstep.training.compiling import compile_model

if TYPE_CHECKING:
    from lockstep.optim.run_summary import RunSummary

_OWNER = "_lockstep_owner"


class PrepareMethods(ProcessView, DataOptions, StateMethods, MemoryMethods, MonitorMethods):
    """Models, optimizers, schedulers and loaders."""

    _settings: Settings
    _strategy: Strategy
    _precision: Precision
    _scaler: LossScaler | None
    _accumulation: Accumulation
    _current_batch: CurrentBatch
    _models: list[nn.Module]
    _optimizers: list[PreparedOptimizer]
    _schedulers: list[PreparedScheduler]
    _dataloaders: list[PreparedDataLoader]
    _record: RunSummary | None
    _number: int
    device_placement: bool

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Called on: all ranks. Make models, optimizers, loaders and schedulers ready, in the order given.

        Other objects come back as they are, and so does what this accelerator has prepared before, unless a model's
        parameters have changed since.
        """
        places = [None] * len(args) if device_placement is None else device_placement
        if len(places) != len(args):
            raise UsageError(f"device_placement has {len(places)} entries for {len(args)} objects. Give one for each.")
        # Schedulers last: they follow the optimizers prepared with them.
        made = [self._prepare_one(item, place) for item, place in zip(args, places, strict=True)]
        made = [self.prepare_scheduler(item) if _is_scheduler(item) else item for item in made]
        return made[0] if len(made) == 1 else tuple(made)

    def _prepare_one(self, item: Any, place: bool | None) -> Any:
        if isinstance(item, DataLoader):
            return self.prepare_data_loader(item, device_placement=place)
        if isinstance(item, nn.Module):
            return self.prepare_model(item, device_placement=place)
        if isinstance(item, torch.optim.Optimizer):
            return self.prepare_optimizer(item, device_placement=place)
        return item

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Called on: all ranks. One model, on its device, in its precision, averaging gradients over the ranks.

        One that was prepared before is wrapped anew when its parameters have changed, or which of them are trained.
        """
        earlier = self._find_prepared(model)
        if earlier is not None:
            if evaluation_mode:
                return model  # as it came: a model out of its wrapper computes alone
            if self._strategy.fits(earlier):
                return earlier
            model = self._strategy.unwrap(model)
        elif _OWNER in model.__dict__:  # of another accelerator, or from before free_memory()
            model = self._strategy.unwrap(model)
        place = self.device_placement if device_placement is None else device_placement
        if unwrap.spans_devices(model):
            if self.use_distributed and not evaluation_mode:
                raise UsageError(
                    "This model is spread over several devices (hf_device_map), and each process needs a whole one. "
                    "Load it without device_map, or start one process."
                )
        elif place:
            model = model.to(self.device)
        self._precision.wrap(model)
        if not evaluation_mode:
            model = self._strategy.wrap(model)
        compile_model(model, self._settings.dynamo)
        model.__dict__[_OWNER] = self._number
        if earlier is None:
            self._models.append(model)
        else:
            self._replace_model(earlier, model)
        self._watch_model(model, trained=not evaluation_mode)
        return model

    def _find_prepared(self, model: nn.Module) -> nn.Module | None:
        """What this accelerator has made of the same model before, or of one that ``torch.compile`` was put around."""
        inner = self._strategy.unwrap(model)
        for prepared in self._models:
            if self._strategy.unwrap(prepared) is inner:
                return prepared
        same = (item for item in self._models if inner_model(item) is inner_model(model))
        return next((item for item in same if not self._strategy.fits(item)), None)

    def _replace_model(self, earlier: nn.Module, model: nn.Module) -> None:
        """Put a model that was prepared again in the place of its old wrapper: checkpoints go by the order."""
        self._watch_only([item for item in self._models if item is not earlier])
        self._models[:] = [model if item is earlier else item for item in self._models]
        if model is not earlier:
            self._strategy.replaced(earlier)
            self._given_up = WeakSet((*self._given_up, earlier))

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """One optimizer, stepping only when an update is due."""
        if isinstance(optimizer, PreparedOptimizer):
            if any(optimizer is prepared for prepared in self._optimizers):
                return optimizer
            optimizer = optimizer.optimizer  # of another accelerator, or from before free_memory()
        for prepared in self._optimizers:
            if prepared.optimizer is optimizer:
                return prepared
        made = PreparedOptimizer(
            optimizer, self._accumulation, self._scaler, self._announce_run, self._gate, self._stepped
        )
        self._optimizers.append(made)
        for scheduler in self._schedulers:
            scheduler.adopt(made)
        return made

    def _stepped(self, optimizer: PreparedOptimizer) -> None:
        """After an optimizer's step: a script that calls ``loss.backward()`` itself trains as well."""
        self._strategy.stepped(optimizer)
        self._current_batch.trained()

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """One learning rate scheduler, following the optimizer it was made for."""
        if isinstance(scheduler, PreparedScheduler):
            if any(scheduler is prepared for prepared in self._schedulers):
                return scheduler
            scheduler = scheduler.scheduler
        for prepared in self._schedulers:
            if prepared.scheduler is scheduler:
                return prepared
        made = PreparedScheduler(
            scheduler,
            self._optimizers,
            self._accumulation,
            with_optimizer=self._settings.step_with_optimizer,
            unit=self._settings.scheduler_unit,
            processes=1 if self.split_batches else self.num_processes,
            announce=self._announce_horizon,
        )
        self._schedulers.append(made)
        return made

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedDataLoader:
        """Called on: all ranks. One loader: this rank's share of it."""
        if slice_fn_for_dispatch is not None:
            raise UsageError(
                "slice_fn_for_dispatch has nothing to do here: rank 0 reads a batch of its own for every rank, so that "
                "no batch is ever sliced. Leave it out."
            )
        if isinstance(data_loader, PreparedDataLoader):
            if data_loader.is_copy and data_loader._current_batch is self._current_batch:
                if not any(data_loader is other for other in self._dataloaders):
                    self._dataloaders.append(data_loader)
                return data_loader
            if any(data_loader._epoch is other._epoch for other in self._dataloaders):
                return data_loader  # itself, or without its first batches
            if data_loader.original is None:
                raise UsageError(
                    "This loader is a copy of one that another Accelerator has prepared, or that was prepared before "
                    "free_memory(). Pass the original DataLoader."
                )
            data_loader = data_loader.original
        place = self.device_placement if device_placement is None else device_placement
        options = self.dataloader_config
        if options.use_seedable_sampler and options.data_seed is None:
            # Seeds may differ between ranks; the order may not.
            seed = self._shared_seed(sys._getframe())
            options = dataclasses.replace(options, data_seed=seed)
        made = prepare_loader(
            data_loader,
            self._group,
            options,
            device=self.device if place else None,
            current_batch=self._current_batch,
            synchronize=self._synchronize_loader,
            own_generator=RNGType.GENERATOR in self._settings.rng_types,
            pad_empty_ranks_only=self._settings.reproducible,
            name=self._name_loader(sys._getframe()) if self.num_processes > 1 else "",
        )
        made.original = data_loader
        self._dataloaders.append(made)
        made.after_batch = self._after_batch
        return made

    def _shared_seed(self, frame: FrameType) -> int:
        """The seed of the first rank that prepares this loader: the same on all, and nobody waits for it."""
        mine = str(torch.initial_seed() % 2**31)
        if self.num_processes == 1:
            return int(mine)
        lines = f"seed < {sites.spell_path(frame)}"
        key = hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
        seed: int = self._group.store.claim(self._group.key(f"seed/{key}/{self._group.ordinal(key)}"), mine, int)
        return seed

    def _name_loader(self, frame: FrameType) -> str:
        """A name that other ranks give to the same loader: by the lines that led here, and how often they have.

        Ranks may prepare loaders that others do not have, so counting all of them would not do.
        """
        lines = hashlib.blake2b(sites.spell_path(frame).encode(), digest_size=16).hexdigest()
        return f"{lines}/{self._group.ordinal(lines)}"

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """The loader without its first batches on each rank; indexed samples that are skipped are not read."""
        return skip_first_batches(dataloader, num_batches)

    def _synchronize_loader(self, generator: torch.Generator | None) -> None:
        wanted = [kind for kind in self._settings.rng_types if kind.value != "generator" or generator is not None]
        rng.synchronize(self._group, self.device, wanted, generator)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's model, out of what ``prepare`` put around it."""
        return unwrap.unwrap(model, self._strategy, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model is spread over several devices."""
        return unwrap.spans_devices(model)

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything that was prepared, and of the device's cache; gives a None for each object."""
        for kept in self._prepared:
            kept.clear()
        self._stop_watching()
        if self._scaler is not None:
            self._scaler.forget()
        self._current_batch.clear()
        self._accumulation.optimizers.clear()
        self._record = None  # what is prepared next may be set up differently
        self._accumulation.reset()
        empty_cache()
        return [None] * len(objects)

    def clear(self, *objects: Any) -> list[None]:
        """The same as ``free_memory``."""
        return self.free_memory(*objects)

    def _start_again(self) -> None:
        """After a new generation: attach the models to it, and give up the open window."""
        for model in self._models:
            self._strategy.reattach(model)
        for model in self._given_up:
            self._strategy.detach(model)
        self._accumulation.reset()

    # --- told once ---------------------------------------------------------------------------------------------

    def _announce_horizon(self, scheduler: PreparedScheduler) -> None:
        iteration, length = self._current_batch.training, schedule_length.schedule_length(scheduler.scheduler)
        if length is None or iteration is None or not self._settings.step_with_optimizer:
            return
        loader = iteration.loader
        try:
            batches = len(loader)
        except TypeError:
            return
        updates = -(-batches // self._accumulation.num_steps)
        # Who counts updates did not count the batches of the unprepared loader.
        before = loader.batches_before if self._settings.scheduler_unit is SchedulerUnit.PROCESS else None
        per_update = scheduler.steps_per_update
        line = schedule_length.describe(length, updates * per_update, per_update, before, batches)
        if line is not None:
            from lockstep.logging import get_notices  # loaded where it is used: there is seldom anything to log

            get_notices("lockstep.run").info(line)

    def _announce_run(self, optimizer: PreparedOptimizer) -> None:
        """Before the first update: tell how the run is set up, and what that changes against the run before."""
        iteration = self._current_batch.training
        loader = None if iteration is None else iteration.loader
        if self._record is not None or loader is None:
            return
        from lockstep.optim import run_summary, run_summary_file  # loaded where it is used: once

        self._record = run_summary.record_of(
            total_batch=loader.total_batch_size,
            processes=self.num_processes,
            accumulation=self._accumulation.num_steps,
            groups=optimizer.param_groups,
            seed=rng.seed_in_force(),
            precision=self._precision.mode.value,
        )
        if not self.is_main_process:
            return
        from lockstep.logging import get_notices  # loaded where it is used: once, on one process

        notices = get_notices("lockstep.run")
        notices.info(self._record.line())
        told = run_summary.compare_loaded(self._loaded_run, self._record)
        folder = self.project_configuration.project_dir
        told += run_summary_file.write_summary(folder, self._record) if folder else []
        for warning in dict.fromkeys(told):
            notices.warning(warning)


def _is_scheduler(item: Any) -> bool:
    return isinstance(item, (LRScheduler, PreparedScheduler))
