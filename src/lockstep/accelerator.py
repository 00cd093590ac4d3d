"""The facade: resolve what was asked for, build the parts, delegate."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep import current
from lockstep.checkpoint.checkpoint_methods import ModelFileMethods
from lockstep.comm import rng
from lockstep.comm.collective_methods import CollectiveMethods
from lockstep.config import env
from lockstep.config.choices import DebugTool, PrecisionType
from lockstep.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from lockstep.config.settings import read_settings
from lockstep.data.current_batch import CurrentBatch
from lockstep.data.global_batch import GlobalBatch, name_samples
from lockstep.data.loader import PreparedDataLoader
from lockstep.errors import UsageError
from lockstep.memory.oom_report import advise
from lockstep.numerics.policy import MonitorContext
from lockstep.optim import clip
from lockstep.optim.accumulation import Accumulation, silenced
from lockstep.optim.microbatch import MicroBatch
from lockstep.optim.optimizer import PreparedOptimizer
from lockstep.optim.scheduler import PreparedScheduler
from lockstep.optim.unprepared_check import refuse_strangers
from lockstep.optim.unprepared_schedule import ScheduleCheck
from lockstep.precision import mixed
from lockstep.rundir.crash_report import ADVISERS
from lockstep.state import AcceleratorState, GradientState, fix_precision
from lockstep.strategies.choose import choose
from lockstep.topology.topology import Topology
from lockstep.training.prepare import PrepareMethods

if TYPE_CHECKING:
    from lockstep.optim.run_summary import RunSummary

_numbers = itertools.count()
_living: weakref.WeakValueDictionary[int, Accelerator] = weakref.WeakValueDictionary()
"""The accelerators of this process, by their numbers."""
_LATER = (
    "init_trackers, get_tracker, log, trackers, maybe_context_parallel, lomo_backward, torch_device_mesh, is_fsdp2, "
    "deepspeed_plugin, fp8_backend, should_save_model, tensor_parallel_rank, data_parallel_rank, "
    "data_parallel_shard_rank, pipeline_parallel_rank, context_parallel_rank, "
    "is_composable_parallelism_enabled, deepspeed_ulysses_dl_adapter"
)
"""Names of the known interface that this release does not have."""


class Accelerator(PrepareMethods, CollectiveMethods, ModelFileMethods):
    """Runs a training script on one device or many.

    Arguments are those of Accelerate, with these additions: ``step_with_optimizer`` is the guides' name for
    ``step_scheduler_with_optimizer``; ``scheduler_unit="update"`` makes one ``scheduler.step()`` one step on any number
    of processes; ``debug`` verifies each collective before it runs, or with ``"underflow_overflow"`` looks for the
    first NaN or infinity in every module; ``nan_policy`` is what is done about a loss or gradient that is no number:
    "warn", "skip" the update, "stop" or "off"; ``reproducible`` makes the same parameters on any number of processes,
    as long as the effective batch is the same; ``save_on_signal`` makes SIGTERM and SIGUSR1 save the state and end the
    job. Whatever cannot be honoured raises here.
    """

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
        self._settings = settings = read_settings(
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
            not_built={
                "deepspeed_plugin": deepspeed_plugin,
                "deepspeed_plugins": deepspeed_plugins,
                "fsdp_plugin": fsdp_plugin,
                "torch_tp_plugin": torch_tp_plugin,
                "megatron_lm_plugin": megatron_lm_plugin,
                "parallelism_config": parallelism_config,
                "log_with": log_with,
            },
        )
        init = settings.handlers.get(InitProcessGroupKwargs)
        # A second Accelerator that says nothing of debug mode does not end it.
        debug_mode = DebugTool.COLLECTIVES in settings.debug or (False if debug is False else None)
        session = current.require(
            cpu=cpu,
            init=init,  # type: ignore[arg-type]
            debug=debug_mode,
            check=self._check_place,
            project_dir=settings.project.project_dir,
        )
        self._session, self._topology, self._group = session, session.topology, session.group
        asked = None if settings.mixed_precision is None else settings.mixed_precision.value
        mode = PrecisionType(fix_precision(session, asked))
        self._precision = mixed.Precision(mode, self.device, settings.handler(AutocastKwargs))
        self._scaler = self._precision.make_scaler(settings.handler(GradScalerKwargs))
        self._current_batch = CurrentBatch()
        self._accumulation = Accumulation(settings.accumulation, self._current_batch)
        choice = choose(self._topology, self._group, settings.handler(DistributedDataParallelKwargs))
        self._strategy, self._strategy_reason = choice.strategy, choice.reason
        self.dataloader_config = settings.data
        self.device_placement = settings.device_placement
        self.project_configuration = settings.project
        self._models: list[nn.Module] = []
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._dataloaders: list[PreparedDataLoader] = []
        self._prepared = (self._models, self._optimizers, self._schedulers, self._dataloaders)
        self._updates = 0
        self._number = next(_numbers)
        _living[self._number] = self
        self._record: RunSummary | None = None
        """How the run is set up; None before its first update."""
        self._guarded = False
        self._schedule_check = ScheduleCheck(self._optimizers, self._schedulers)
        self._start_watching(
            self._group,
            settings.nan_policy,
            settings.debug,
            settings.numerics_record,
            scaled=self._scaler is not None,
            around=MonitorContext(
                samples=self._current_round,
                spell=_spell_samples,
                update=lambda: self._updates,
                folder=None if session.directory is None else session.directory.numerics,
                number=self._number,
            ),
        )
        self._group.on_rebuild(self._start_again)
        session.accelerator = self
        self._heed_signals(settings.save_on_signal)
        if advise not in ADVISERS:
            ADVISERS.append(advise)
        if settings.reproducible:
            from lockstep.logging import get_logger  # loaded where it is used: there is seldom anything to say

            get_logger(__name__).info("reproducible: the order comes from the seed, and every sample counts the same")

    def _check_place(self, topology: Topology) -> None:
        """Refuse what the device cannot do, before a process group is made."""
        rng.check_types(self._settings.rng_types, topology.device)
        if self._settings.mixed_precision is not None:
            mixed.check_device(self._settings.mixed_precision, topology.device)

    def __repr__(self) -> str:
        if "_strategy" not in self.__dict__:  # unpickled in a process that is not its own
            return f"Accelerator({self._topology})"
        return (
            f"Accelerator({self._topology}; {self._strategy_reason}; mixed precision "
            f"{self._precision.mode} from {self._settings.precision_source})"
        )

    @classmethod
    def _of_session(cls, session: current.Session, number: int | None) -> Any:
        return None if number is None else _living.get(number)

    def __reduce__(self) -> tuple[Any, ...]:
        from lockstep.comm import pickling

        number = self.__dict__.get("_number")
        return pickling.taken_apart(self, number, self._session.mixed_precision)

    def __getattr__(self, name: str) -> Any:
        away = getattr(self.__dict__.get("_group"), "away", None)
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
        return GradientState(accumulation=self._accumulation)

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes with an accelerator each."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def mixed_precision(self) -> str:
        """Precision of the forward pass."""
        return self._precision.mode.value

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
        """Leave the job, when a checkpoint that is being written is complete."""
        self._heed_signals(False)
        self.wait_for_checkpoint()
        current.reset()

    # --- training ----------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch completes an update."""
        return self._accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulation.sync_gradients = bool(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._accumulation.set_steps(value)

    @property
    def step(self) -> int:
        """Micro-batches since the last end of a loader."""
        return self._accumulation.step

    @step.setter
    def step(self, value: int) -> None:
        self._accumulation.step = value

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Torch's loss scaler; None unless training in fp16."""
        return None if self._scaler is None else self._scaler.torch_scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer's last update was dropped: by an fp16 overflow, or by ``nan_policy="skip"``."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro-batch: gradients stay on this rank until the one that completes an update."""
        if self._accumulation.num_steps > 1 and not self._guarded:
            self._guarded = True
            refuse_strangers(self._accumulation, self._parameters)
        return MicroBatch(self._strategy, self._accumulation, models, self._schedule_check)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A region in which backward leaves the model's gradients on this rank."""
        return self._strategy.no_sync(model) or nullcontext()

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """A region whose backward averages the gradients of forwards that ran under ``no_sync``."""
        return self._strategy.forced_sync(model)

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Called on: all ranks. A region in which each rank may train these models on as many batches as it has.

        A rank that has run out waits at the region's end, where all get the same weights and optimizer states. Inside,
        each forward has its backward, and ranks do nothing else together. ``even_batches`` overrides that of the
        loaders; when it is True the ranks have equally many batches, and nothing is done.
        """
        loaders = [] if even_batches is None else [(loader, loader.even_batches) for loader in self._dataloaders]
        states = (*self._optimizers, *self._schedulers, *(() if self.scaler is None else (self.scaler,)))
        try:
            for loader, _ in loaders:
                loader.even_batches = bool(even_batches)
            with nullcontext() if even_batches else self._strategy.join(joinables, self._accumulation, states):
                yield
        finally:
            for loader, before in loaders:
                loader.even_batches = before

    def backward(self, loss: Tensor, *, num_items: Any = None, **kwargs: Any) -> None:
        """Called on: all ranks. Backward of a loss that is a mean, scaled for the accumulation window.

        ``num_items``, the tokens or samples that the mean is over, weights it across micro-batches and ranks, so that
        the gradient is that of the mean over all items, however they are split. With ``reproducible`` it is the
        number of real samples in the loader's batch, unless another is given.
        """
        accumulation = self._accumulation
        if num_items is None:
            num_items = self._items_of_batch()
        # A mean over nothing is no number, and counts for nothing.
        if self._watch is not None and isinstance(loss, Tensor) and (num_items is None or num_items):
            loss = self._watch.loss(loss)
        if num_items is None:
            loss = accumulation.scaled(loss)
        else:
            loss = accumulation.weighted(self._group, loss, num_items)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        box = self._group.box
        iteration = self._current_batch.training
        entered = self._strategy.enter_backward(loss, 0 if iteration is None else iteration.turn)
        if entered is not None:
            self._current_batch.trained()
        number = -1 if entered is None else entered
        if number < 0:
            box.phase("backward, not averaging")
        clock = self._group.clock
        began = monotonic()
        try:
            if num_items is not None and not num_items:
                with silenced(self._parameters()):
                    loss.backward(**kwargs)
            else:
                loss.backward(**kwargs)
        except RuntimeError as error:
            if self._group.is_consequence(error):
                raise self._group.explain(error, "averaging gradients") from None
            raise
        finally:
            if number < 0:
                box.phase("")
            box.leave(number)
        if number > 0 and clock is not None and clock.on:
            clock.backwards.append((began, monotonic()))
        if accumulation.sync_gradients:
            self._complete_update(num_items is not None, counts=entered is not None)
        if self._watch is not None and self._watch.pending:
            self._watch.report()

    def _complete_update(self, weighted: bool, counts: bool = True) -> None:
        """Called on: all ranks. After the backward that closes a window: bring its gradients to scale.

        Something that one rank trains beside the models does not count as an update: ranks compare their numbers.
        """
        if counts:
            self._updates += 1
            self._group.box.step(self._updates)
        if weighted:
            self._accumulation.divide_by_items(self._group, self._parameters())
        elif not self._accumulation.settled:
            self._accumulation.rescale_gradients(self._parameters())
        if self._on_update is not None:
            self._on_update()

    def _items_of_batch(self) -> int | None:
        """What a batch counts for where nobody says: its samples when results are to be reproducible, else nothing."""
        return self._real_samples() if self._settings.reproducible else None

    def _current_round(self) -> GlobalBatch | None:
        """What all ranks train on now; None when no prepared loader is being iterated."""
        return self._current_batch.round

    def _real_samples(self) -> int:
        """How many samples of this rank's batch are no repeats."""
        now = self._current_batch.round
        if now is None:
            raise UsageError(
                "reproducible=True weights each loss by the samples of its batch, and no prepared loader is being "
                "iterated. Prepare the loader, or say what the loss is a mean of: backward(loss, num_items=…)."
            )
        return now.real[self.process_index]

    def _parameters(self) -> list[Tensor]:
        """What is being trained: the parameters of prepared models and optimizers, each once."""
        of_models = (parameter for model in self._models for parameter in model.parameters())
        of_optimizers = (parameter for optimizer in self._optimizers for parameter in optimizer.parameters())
        return list({id(parameter): parameter for parameter in (*of_models, *of_optimizers)}.values())

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Take fp16's loss scale out of the gradients; nothing in other precisions."""
        if self._scaler is None or not self._accumulation.sync_gradients:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for item in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            self._scaler.unscale(item.optimizer if isinstance(item, PreparedOptimizer) else item)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the norm of the gradients and give it as it was; nothing is clipped while an update is not due."""
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.unscale_gradients(self._owners(chosen))
        due = self._accumulation.sync_gradients
        scale = 1.0 if due or self._scaler is None else self._scaler.current()
        sparing = self._watch is not None and self._watch.spares
        norm = clip.clip_norm(chosen, max_norm, norm_type, due=due, scale=scale, sparing=sparing)
        if self._watch is not None and due:
            self._watch.norm(norm, chosen)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each gradient value; nothing is clipped while an update is not due."""
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self.unscale_gradients(self._owners(chosen))
        if self._accumulation.sync_gradients:
            torch.nn.utils.clip_grad_value_(chosen, clip_value)

    def _owners(self, parameters: list[Tensor]) -> list[PreparedOptimizer]:
        """The optimizers of these parameters: another one's gradients may not be complete yet."""
        if self._scaler is None:
            return []
        wanted = {id(parameter) for parameter in parameters}
        return [item for item in self._optimizers if any(id(owned) in wanted for owned in item.parameters())]

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A region that computes in the accelerator's precision."""
        return self._precision.autocast(autocast_handler)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """A region recorded by torch's profiler."""
        from lockstep.profiling import profiler  # loaded where it is used, as few scripts do

        return profiler(profile_handler or self._settings.handler(ProfileKwargs), self.process_index)

    # --- talking to other ranks --------------------------------------------------------------------------------

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Called on: all ranks. The same, without the samples that were repeated to fill the last batch."""
        from lockstep.data import metrics  # loaded where it is used, as not every script evaluates

        newest = self._current_batch.newest
        now, counts = (None, None) if newest is None else (newest.round, newest.item_counts)
        return metrics.gather(self._group, input_data, now, as_objects=use_gather_object, counts=counts)


def _spell_samples(now: GlobalBatch | None) -> str:
    return "" if now is None or not now.ids else name_samples(now.ids)
