"""The facade: resolve what was asked for, build the parts, delegate."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import current
from lockstep.comm import control, rng, tensors
from lockstep.comm.process_info import ProcessView
from lockstep.config import env
from lockstep.config.choices import DebugTool, PrecisionType
from lockstep.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from lockstep.config.settings import Settings, read_settings
from lockstep.config.sizes import check_size
from lockstep.data.loader import PreparedDataLoader
from lockstep.data.options import DataOptions
from lockstep.data.prepare import skip_first_batches
from lockstep.errors import ConfigError
from lockstep.memory.oom_report import advise
from lockstep.numerics.monitors import start_monitors
from lockstep.optim.optimizer import PreparedOptimizer
from lockstep.optim.scheduler import PreparedScheduler
from lockstep.precision import mixed
from lockstep.rundir.crash_report import add_adviser
from lockstep.state import AcceleratorState, GradientState, fix_precision
from lockstep.strategies.base import Strategy
from lockstep.topology.memory import empty_cache
from lockstep.topology.topology import Topology
from lockstep.training import step as training_step
from lockstep.training import unwrap
from lockstep.training.prepare import Preparer, prepare
from lockstep.training.state import TrainingState

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lockstep.checkpoint.manager import CheckpointManager, LoadHook, SaveHook
    from lockstep.checkpoint.preemption import Preemption
    from lockstep.comm.agree import Agreement
    from lockstep.tracking.general import GeneralTracker
    from lockstep.tracking.job_trackers import JobTrackers

_living: weakref.WeakValueDictionary[int, Accelerator] = weakref.WeakValueDictionary()
"""The accelerators of this process, by their numbers."""
_LATER = (
    "maybe_context_parallel, lomo_backward, torch_device_mesh, is_fsdp2, "
    "deepspeed_plugin, fp8_backend, should_save_model, tensor_parallel_rank, data_parallel_rank, "
    "data_parallel_shard_rank, pipeline_parallel_rank, context_parallel_rank, "
    "is_composable_parallelism_enabled, deepspeed_ulysses_dl_adapter"
)
"""Names of the known interface that this release does not have."""


class Accelerator(ProcessView, DataOptions):
    """Runs a training script on one device or many.

    Arguments are those of Accelerate, with these additions: ``step_with_optimizer`` is the guides' name for
    ``step_scheduler_with_optimizer``; ``scheduler_unit="update"`` makes one ``scheduler.step()`` one step on any number
    of processes; ``debug`` verifies each collective before it runs, or with ``"underflow_overflow"`` looks for the
    first NaN or infinity in every module; ``nan_policy`` is what is done about a loss or gradient that is no number:
    "warn", "skip" the update, "stop" or "off"; ``reproducible`` makes the same parameters on any number of processes,
    as long as the effective batch is the same; ``save_on_signal`` makes SIGTERM and SIGUSR1 save the state and end the
    job. Whatever cannot be honoured raises here.
    """

    _strategy_class: ClassVar[type[Strategy] | None] = None
    """How models are trained; None: by the number of processes."""

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Iterable[Any] | None = None,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool | None = None,
        kwargs_handlers: Iterable[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        step_with_optimizer: bool | None = None,
        scheduler_unit: str = "process",
        debug: bool | str | Iterable[str] | None = None,
        reproducible: bool | None = None,
        nan_policy: str | None = None,
        save_on_signal: bool | None = None,
    ) -> None:
        environ = env.snapshot()
        settings = read_settings(
            environ,
            device_placement=device_placement,
            split_batches=split_batches,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            dataloader_config=dataloader_config,
            rng_types=rng_types,
            project_dir=project_dir,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            step_with_optimizer=step_with_optimizer,
            kwargs_handlers=kwargs_handlers,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            scheduler_unit=scheduler_unit,
            debug=debug,
            nan_policy=nan_policy,
            reproducible=reproducible,
            save_on_signal=save_on_signal,
            read_trackers=lambda folder: _read_trackers(log_with, folder),
            not_built={
                "deepspeed_plugin": deepspeed_plugin,
                "deepspeed_plugins": deepspeed_plugins,
                "fsdp_plugin": fsdp_plugin,
                "torch_tp_plugin": torch_tp_plugin,
                "megatron_lm_plugin": megatron_lm_plugin,
                "parallelism_config": parallelism_config,
            },
        )
        self._session = session = current.require(
            cpu=cpu,
            init=settings.handlers.get(InitProcessGroupKwargs),  # type: ignore[arg-type]
            # A second Accelerator that says nothing of debug mode does not end it.
            debug=DebugTool.COLLECTIVES in settings.debug or (False if debug is False else None),
            check=lambda topology: _check_place(settings, topology),
            project_dir=settings.project.project_dir,
        )
        self._settings = settings
        self.dataloader_config = settings.data
        self.device_placement = settings.device_placement
        asked = None if settings.mixed_precision is None else settings.mixed_precision.value
        mode = PrecisionType(fix_precision(session, asked))
        precision = mixed.Precision(mode, self.device, settings.handler(AutocastKwargs))
        self._state = TrainingState.build(session.topology, session.group, settings, precision, self._strategy_class)
        _living[self._state.number] = self
        start_monitors(self._state, settings, None if session.directory is None else session.directory.numerics)
        session.training = self._state
        self._trigger = False
        self._tracking = settings.trackers
        self._preemption = self._heed_signals() if settings.save_on_signal else None
        self._preparer = Preparer(self._state, settings, None if self._preemption is None else self._preemption.check)
        add_adviser(advise)
        if settings.reproducible:
            from lockstep.logging import get_logger  # loaded where it is used: there is seldom anything to say

            get_logger(__name__).info("reproducible: the order comes from the seed, and every sample counts the same")

    def _heed_signals(self) -> Preemption:
        from lockstep.checkpoint.preemption import Preemption  # loaded where it is used, as few scripts do

        return Preemption(self._state, self.save_state, self.end_training)

    def __repr__(self) -> str:
        if "_state" not in self.__dict__:  # unpickled in a process that is not its own
            return f"Accelerator({self._session.topology})"
        topology = self._session.topology
        return (
            f"Accelerator({topology}; {self._state.strategy.reason(topology)}; mixed precision "
            f"{self.mixed_precision} from {self._settings.precision_source})"
        )

    @classmethod
    def _of_session(cls, session: current.Session, number: int | None) -> Any:
        return None if number is None else _living.get(number)

    def __reduce__(self) -> tuple[Any, ...]:
        from lockstep.comm import pickling

        state = self.__dict__.get("_state")
        return pickling.taken_apart(self, None if state is None else state.number, self._session.mixed_precision)

    def __getattr__(self, name: str) -> Any:
        session = self.__dict__.get("_session")
        away = None if session is None else getattr(session.group, "away", None)
        if away and not name.startswith("__"):
            raise AttributeError(f"Accelerator.{name}: {away}")
        if name in _LATER.split(", "):
            raise AttributeError(f"Accelerator.{name} is known from Accelerate, but this release does not have it yet.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- who and where -----------------------------------------------------------------------------------------

    @property
    def state(self) -> AcceleratorState:
        """A view of this process's place and precision."""
        state: AcceleratorState = AcceleratorState._of_session(self._session, None)
        return state

    @property
    def gradient_state(self) -> GradientState:
        """A view of where accumulation stands."""
        return GradientState(accumulation=self._state.accumulation)

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes with an accelerator each."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def mixed_precision(self) -> str:
        """Precision of the forward pass."""
        return self._state.precision.mode.value

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where files go, and the number of the next checkpoint."""
        return self._state.project

    @project_configuration.setter
    def project_configuration(self, value: ProjectConfiguration) -> None:
        self._state.project = value

    @property
    def project_dir(self) -> str | None:
        """The project's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder for trackers' logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint."""
        return self.project_configuration.iteration

    # Libraries and scripts look at these, under the names that Accelerate has for them.

    @property
    def _models(self) -> list[nn.Module]:
        return self._state.models

    @property
    def _optimizers(self) -> list[PreparedOptimizer]:
        return self._state.optimizers

    @property
    def _schedulers(self) -> list[PreparedScheduler]:
        return self._state.schedulers

    @property
    def _dataloaders(self) -> list[PreparedDataLoader]:
        return self._state.loaders

    # --- options in force --------------------------------------------------------------------------------------

    @property
    def rng_types(self) -> list[str]:
        """Generators put in step at each start of a loader."""
        return [kind.value for kind in self._settings.rng_types]

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether a prepared scheduler follows the optimizer."""
        return self._settings.step_with_optimizer

    def end_training(self) -> None:
        """Leave the job, when a checkpoint that is being written is complete and the trackers are finished."""
        if self._preemption is not None:
            self._preemption.close()
        self.wait_for_checkpoint()
        if self._tracking is not None:
            self._tracking.finish()
        current.reset()

    # --- preparing ---------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Called on: all ranks. Make models, optimizers, loaders and schedulers ready, in the order given.

        Other objects come back as they are, and so does what this accelerator has prepared before, unless a model's
        parameters have changed since.
        """
        makers = (
            (DataLoader, self.prepare_data_loader),
            (nn.Module, self.prepare_model),
            (torch.optim.Optimizer, self.prepare_optimizer),
        )
        return prepare(args, device_placement, makers, self.prepare_scheduler)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Called on: all ranks. One model, on its device, in its precision, averaging gradients over the ranks.

        One that was prepared before is wrapped anew when its parameters have changed, or which of them are trained.
        """
        return self._preparer.prepare_model(model, self._place(device_placement), evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """One optimizer, stepping only when an update is due."""
        return self._preparer.prepare_optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """One learning rate scheduler, following the optimizer it was made for."""
        return self._preparer.prepare_scheduler(scheduler, self.split_batches)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedDataLoader:
        """Called on: all ranks. One loader: this rank's share of it."""
        place, options = self._place(device_placement), self.dataloader_config
        return self._preparer.prepare_data_loader(data_loader, options, place, slice_fn_for_dispatch)

    def _place(self, asked: bool | None) -> bool:
        return self.device_placement if asked is None else asked

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """The loader without its first batches on each rank; indexed samples that are skipped are not read."""
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's model, out of what ``prepare`` put around it."""
        return self._state.unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model is spread over several devices."""
        return unwrap.spans_devices(model)

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything that was prepared, and of the device's cache; gives a None for each object."""
        self._state.clear()
        empty_cache()
        return [None] * len(objects)

    def clear(self, *objects: Any) -> list[None]:
        """The same as ``free_memory``."""
        return self.free_memory(*objects)

    # --- experiment trackers -----------------------------------------------------------------------------------

    @property
    def log_with(self) -> list[Any]:
        """The trackers that were asked for."""
        return [] if self._tracking is None else self._tracking.chosen

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that run in this process: those of the main process, after ``init_trackers``."""
        return [] if self._tracking is None else self._tracking.running

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start a run in every tracker. Other processes than the main one do nothing.

        ``config`` are the settings to be kept with the run, ``init_kwargs`` further arguments by tracker:
        ``{"wandb": {"tags": ["a"]}}``.
        """
        if self._tracking is not None and self.is_main_process:
            self._tracking.start(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log the main process's values to every tracker. Other processes do nothing: gather or reduce before."""
        if self._tracking is not None and self.is_main_process:
            self._tracking.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name, or with ``unwrap`` its library's run; where none runs, one that does nothing."""
        if self._tracking is not None:
            return self._tracking.get(name, unwrap)
        from lockstep.tracking.general import GeneralTracker  # loaded where it is used, as not every script tracks

        return GeneralTracker(_blank=True)

    # --- training ----------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch completes an update."""
        return self._state.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._state.accumulation.sync_gradients = bool(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._state.accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._state.accumulation.set_steps(value)

    @property
    def step(self) -> int:
        """Micro-batches since the last end of a loader."""
        return self._state.accumulation.step

    @step.setter
    def step(self, value: int) -> None:
        self._state.accumulation.step = value

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Torch's loss scaler; None unless training in fp16."""
        return self._state.torch_scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer's last update was dropped: by an fp16 overflow, or by ``nan_policy="skip"``."""
        return any(optimizer.step_was_skipped for optimizer in self._state.optimizers)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro-batch: gradients stay on this rank until the one that completes an update."""
        return training_step.accumulate(self._state, models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A region in which backward leaves the model's gradients on this rank."""
        return self._state.strategy.no_sync(model) or nullcontext()

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """A region whose backward averages the gradients of forwards that ran under ``no_sync``."""
        return self._state.strategy.forced_sync(model)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Called on: all ranks. A region in which each rank may train these models on as many batches as it has.

        A rank that has run out waits at the region's end, where all get the same weights and optimizer states. Inside,
        each forward has its backward, and ranks do nothing else together. ``even_batches`` overrides that of the
        loaders; when it is True the ranks have equally many batches, and nothing is done.
        """
        return training_step.join_uneven_inputs(self._state, joinables, even_batches)

    def backward(self, loss: Tensor, *, num_items: Any = None, **kwargs: Any) -> None:
        """Called on: all ranks. Backward of a loss that is a mean, scaled for the accumulation window.

        ``num_items``, the tokens or samples that the mean is over, weights it across micro-batches and ranks, so that
        the gradient is that of the mean over all items, however they are split. With ``reproducible`` it is the
        number of real samples in the loader's batch, unless another is given.
        """
        training_step.backward(self._state, loss, num_items, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Take fp16's loss scale out of the gradients; nothing in other precisions."""
        training_step.unscale_gradients(self._state, optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the norm of the gradients and give it as it was; nothing is clipped while an update is not due."""
        return training_step.clip_norm(self._state, parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each gradient value; nothing is clipped while an update is not due."""
        training_step.clip_value(self._state, parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A region that computes in the accelerator's precision."""
        return self._state.precision.autocast(autocast_handler)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """A region recorded by torch's profiler."""
        from lockstep.profiling import profiler  # loaded where it is used, as few scripts do

        return profiler(profile_handler or self._settings.handler(ProfileKwargs), self.process_index)

    @property
    def microbatch_size(self) -> int | None:
        """The most samples that ``auto_microbatch`` computes at once; None while every batch has fitted whole."""
        return self._state.microbatch_size

    @microbatch_size.setter
    def microbatch_size(self, value: int | None) -> None:
        self._state.microbatch_size = None if value is None else check_size(value, "microbatch_size")

    def auto_microbatch(
        self,
        batch: Any,
        compute_loss: Callable[[Any], Tensor],
        *,
        num_items: Callable[[Any], Any] | None = None,
        split: Callable[[Any, slice], Any] | None = None,
    ) -> Tensor:
        """Called on: all ranks. Forward and backward of one batch, in smaller parts on all ranks when memory runs out.

        Gradients are averaged once, after the last part, and are those of the whole batch. Returns its loss.

        Args:
            batch: Tensors, or tuples, lists, mappings and dataclasses of them; split along the first dimension.
            compute_loss: Gets a part of the batch, runs the model, returns the mean loss over the part's samples. It is
                called again for samples whose part did not fit, and does nothing with other ranks.
            num_items: A function of a part that counts what the loss is a mean of, where that is not samples.
            split: A function of the batch and a slice of its rows, for batches of another form.
        """
        from lockstep.memory.microbatch import train_on  # loaded where it is used, as few scripts do

        return train_on(self._state, batch, compute_loss, num_items, split)

    # --- with other ranks --------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Called on: all ranks. Each tensor of the structure from all ranks, joined along the first dimension."""
        return tensors.gather(self._session.group, tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Called on: all ranks. Each tensor of the structure summed over the ranks; or their "mean", or their "max"."""
        return tensors.reduce(self._session.group, tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int | float = 0, pad_first: bool = False
    ) -> Any:
        """Called on: all ranks. Each tensor padded to its largest size on any rank."""
        return tensors.pad_across_processes(self._session.group, tensor, dim, pad_index, pad_first)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Called on: all ranks. The same, without the samples that were repeated to fill the last batch."""
        from lockstep.data import metrics  # loaded where it is used, as not every script evaluates

        newest = self._state.current_batch.newest
        now, counts = (None, None) if newest is None else (newest.round, newest.item_counts)
        return metrics.gather(
            self._session.group,
            input_data,
            now,
            as_objects=use_gather_object,
            counts=counts,
            data_parallel=self._state.strategy.data_parallel,
        )

    def set_trigger(self) -> None:
        """Say on this rank that something has happened that all ranks should learn of."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Called on: all ranks. Whether any rank has set the trigger since the last check."""
        raised = control.any_rank(self._session.group, self._trigger, "check_trigger")
        self._trigger = self._trigger and not raised
        return raised

    def agree(self, step: Callable[[], Any]) -> Agreement[Any]:
        """Called on: all ranks. Run a step on every rank; when it fails on any, all leave it and learn who failed."""
        from lockstep.comm.agree import agree  # loaded where it is used, as few scripts do

        return agree(self._session.group, step)

    set_breakpoint = set_trigger
    check_breakpoint = check_trigger

    # --- files of models ---------------------------------------------------------------------------------------

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        durable: bool = True,
    ) -> None:
        """Called on: the main process, or all ranks. Write the model's weights for other tools to load.

        The main process writes; the others do nothing, and nobody waits. Files that are there already stay as they are
        until all new ones are complete; those of an earlier save that would be mixed up with them are removed. With
        ``durable`` it waits until the disk has everything.
        """
        from lockstep.model_files import save as saving

        saving.save_model(
            self.get_state_dict(model),
            Path(save_directory),
            max_shard_size,
            safe_serialization,
            durable=durable,
            here=self._writes(),
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state dict, by default under the names it has without anything around it."""
        from lockstep.checkpoint.spread import whole_model
        from lockstep.strategies.unwrap import inner_model

        return whole_model(self._state.strategy, inner_model(self.unwrap_model(model)) if unwrap else model)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object to a file (a path or an open one) in the main process; others do nothing, and none waits."""
        if self._writes():
            from lockstep.model_files import save as saving

            saving.save_object(obj, f, safe_serialization)

    def _writes(self) -> bool:
        each = self.project_configuration.save_on_each_node
        return self._session.topology.is_local_main if each else self._session.topology.is_main

    # --- the state of the run ----------------------------------------------------------------------------------

    @cached_property
    def _checkpoints(self) -> CheckpointManager:
        from lockstep.checkpoint.manager import CheckpointManager

        return CheckpointManager(self._state)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        durable: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Called on: all ranks. Save all that the run needs to resume; the folder, which is complete or not there.

        Called on the main process alone, it saves what that has, and logs what a resumed run will lack.

        Args:
            output_dir: The folder. With ``automatic_checkpoint_naming`` it is ``checkpoints/checkpoint_N`` instead.
            safe_serialization: Whether models go into safetensors files.
            blocking: With False the state is copied to host memory, and written while training goes on.
            durable: Whether to wait until the disk has everything, so that a power cut cannot undo it.
            save_model_func_kwargs: None are known.
        """
        _refuse(save_model_func_kwargs, "save_state")
        return self._checkpoints.save(output_dir, safe=safe_serialization, blocking=blocking, durable=durable)

    def wait_for_checkpoint(self) -> None:
        """Until a save in the background has ended; raises what it failed with. Nothing when there is none."""
        if "_checkpoints" in self.__dict__:
            self._checkpoints.wait()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        trusted: bool = False,
        strict: bool = True,
        **load_model_func_kwargs: Any,
    ) -> str | None:
        """Called on: all ranks. Go on where a state was saved; the folder it came from.

        Args:
            input_dir: The folder. Without it, the newest of ``checkpoints/checkpoint_N`` that is whole; None is given
                when there is none yet, so that a script can always call this.
            load_kwargs: None are known.
            trusted: Whether files may hold any pickled object, as some of Accelerate's do. Loading those can run any
                code: only for files whose origin you know.
            strict: Whether the names of a model's weights must be those in the file.
            load_model_func_kwargs: ``map_location`` is taken and has no effect: values go to where the objects are.
        """
        load_model_func_kwargs.pop("map_location", None)
        _refuse({**(load_kwargs or {}), **load_model_func_kwargs}, "load_state")
        return self._checkpoints.load(input_dir, trusted=trusted, strict=strict)

    # --- what is saved -----------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have objects with ``state_dict`` and ``load_state_dict`` saved and loaded too."""
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Have ``hook(models, weights, output_dir)`` called before each save.

        It may write files there, which become a part of the checkpoint, and take weights off the list.
        """
        return self._checkpoints.before_save(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Have ``hook(models, input_dir)`` called before each load; it may load models itself and take them off."""
        return self._checkpoints.before_load(hook)


def _read_trackers(log_with: Any, logging_dir: str | None) -> JobTrackers | None:
    if log_with is None:
        return None
    from lockstep.tracking.job_trackers import choose_trackers  # loaded where it is used, as not every script tracks

    return choose_trackers(log_with, logging_dir)


def _check_place(settings: Settings, topology: Topology) -> None:
    """Refuse what the device cannot do, before a process group is made."""
    rng.check_types(settings.rng_types, topology.device)
    if settings.mixed_precision is not None:
        mixed.check_device(settings.mixed_precision, topology.device)
    if settings.trackers is not None:
        settings.trackers.check(topology)


def _refuse(options: dict[str, Any], name: str) -> None:
    if options:
        raise ConfigError(f"{name} does not know {', '.join(sorted(options))}. Leave it out.")
