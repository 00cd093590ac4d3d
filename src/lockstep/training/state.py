"""What one accelerator trains with, and how far it is: handed to everything that works on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lockstep.config.handlers import GradScalerKwargs, ProjectConfiguration
from lockstep.config.settings import Settings
from lockstep.data.current_batch import CurrentBatch
from lockstep.data.loader import PreparedDataLoader
from lockstep.errors import UsageError
from lockstep.optim.accumulation import Accumulation
from lockstep.optim.monitor import TrainingMonitor
from lockstep.optim.optimizer import PreparedOptimizer
from lockstep.optim.scheduler import PreparedScheduler
from lockstep.optim.unprepared_schedule import ScheduleCheck
from lockstep.precision.mixed import Precision
from lockstep.precision.scaler import LossScaler
from lockstep.process_group.group import Group
from lockstep.strategies.base import Strategy
from lockstep.strategies.choose import choose
from lockstep.topology.topology import Topology
from lockstep.training import unwrap

if TYPE_CHECKING:
    from lockstep.optim.run_summary import RunSummary

_numbers = itertools.count()

PreparedMark = tuple[list[Any], ...]
"""What was prepared, and which loaders were iterated, at one moment; opaque to others."""


@dataclass(eq=False, kw_only=True)
class TrainingState:
    """The prepared objects, the open accumulation window and the count of updates of one accelerator."""

    topology: Topology
    group: Group
    strategy: Strategy
    precision: Precision
    scaler: LossScaler | None = None
    accumulation: Accumulation
    current_batch: CurrentBatch
    project: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    """Where files go, and the number of the next checkpoint."""
    reproducible: bool = False
    """Whether a batch counts for its real samples where nothing else is said."""
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedDataLoader] = field(default_factory=list)
    given_up: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """Models of attempts that failed, or that were prepared again, and that somebody still refers to."""
    updates: int = 0
    run_summary: RunSummary | None = None
    """How the run is set up; None before its first update."""
    loaded_run: dict[str, Any] | None = None
    """How the run was set up whose state was loaded; None when none was."""
    microbatch_size: int | None = None
    """The most samples that ``auto_microbatch`` computes at once; None while every batch has fitted whole."""
    monitor: TrainingMonitor = field(default_factory=TrainingMonitor)
    """What ``nan_policy`` does."""
    detectors: TrainingMonitor = field(default_factory=TrainingMonitor)
    """What looks at every module, where that was asked for."""
    on_update: Callable[[], None] | None = None
    """Called after each backward that completes an update."""
    number: int = field(default_factory=_numbers.__next__)
    """Among those of the process: all ranks make them in the same order."""

    def __post_init__(self) -> None:
        self.schedule_check = ScheduleCheck(self.optimizers, self.schedulers)
        self.group.add_listener(self)

    @classmethod
    def build(
        cls,
        topology: Topology,
        group: Group,
        settings: Settings,
        precision: Precision,
        asked: type[Strategy] | None = None,
    ) -> TrainingState:
        """The state in which nothing is prepared yet, as the settings want it; trained as was ``asked``."""
        current_batch = CurrentBatch()
        strategy = choose(topology, group, settings, asked)
        return cls(
            topology=topology,
            group=group,
            strategy=strategy,
            precision=precision,
            scaler=precision.make_scaler(
                settings.handler(GradScalerKwargs), None if strategy.sees_all_gradients else strategy.any_rank
            ),
            accumulation=Accumulation(settings.accumulation, current_batch),
            current_batch=current_batch,
            project=settings.project,
            reproducible=settings.reproducible,
        )

    def parameters(self) -> list[Tensor]:
        """What is being trained: the parameters of prepared models and optimizers, each once."""
        of_models = (parameter for model in self.models for parameter in model.parameters())
        of_optimizers = (parameter for optimizer in self.optimizers for parameter in optimizer.parameters())
        return list({id(parameter): parameter for parameter in (*of_models, *of_optimizers)}.values())

    def unwrap(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        """The user's model, out of what ``prepare`` put around it."""
        return unwrap.unwrap(model, self.strategy, keep_fp32_wrapper, keep_torch_compile)

    @property
    def torch_scaler(self) -> torch.amp.GradScaler | None:
        """Torch's loss scaler; None unless training in fp16."""
        return None if self.scaler is None else self.scaler.torch_scaler

    def items_of_batch(self) -> int | None:
        """What a batch counts for where nobody says: its samples when results are to be reproducible, else nothing."""
        if not self.reproducible:
            return None
        now = self.current_batch.round
        if now is None:
            raise UsageError(
                "reproducible=True weights each loss by the samples of its batch, and no prepared loader is being "
                "iterated. Prepare the loader, or say what the loss is a mean of: backward(loss, num_items=…)."
            )
        return now.real[self.strategy.data_parallel.rank]

    def stepped(self, optimizer: PreparedOptimizer) -> None:
        """After an optimizer's step: a script that calls ``loss.backward()`` itself trains as well."""
        self.strategy.stepped(optimizer)
        self.current_batch.trained()

    # --- letting go --------------------------------------------------------------------------------------------

    @property
    def _prepared(self) -> PreparedMark:
        return self.models, self.optimizers, self.schedulers, self.loaders

    def replace_model(self, earlier: nn.Module, model: nn.Module) -> None:
        """Put a model that was prepared again in the place of its old wrapper: checkpoints go by the order."""
        self._watch_only([item for item in self.models if item is not earlier])
        self.models[:] = [model if item is earlier else item for item in self.models]
        if model is not earlier:
            self.strategy.replaced(earlier)
            self.given_up = WeakSet((*self.given_up, earlier))

    def mark(self) -> PreparedMark:
        """What is prepared so far, and the loaders that are being iterated."""
        return tuple(list(kept) for kept in (*self._prepared, self.current_batch.live))

    def forget_since(self, mark: PreparedMark) -> None:
        """Let go of what was prepared since then."""
        dropped: list[Any] = []
        for kept, before in zip((*self._prepared, self.current_batch.live), mark, strict=True):
            known = {id(item) for item in before}
            dropped += [item for item in kept if id(item) not in known]
            kept[:] = [item for item in kept if id(item) in known]
        self.given_up = WeakSet(item for item in (*self.given_up, *dropped) if isinstance(item, nn.Module))
        self._forget_others(self.models)

    def clear(self) -> None:
        """Let go of everything that was prepared."""
        for kept in self._prepared:
            kept.clear()
        self.current_batch.clear()
        self.accumulation.optimizers.clear()
        self._forget_others([])

    def _forget_others(self, models: list[nn.Module]) -> None:
        self._watch_only(models)
        if self.scaler is not None:
            self.scaler.forget()
        self.run_summary = None  # what is prepared next may be set up differently
        self.accumulation.reset()

    def _watch_only(self, models: list[nn.Module]) -> None:
        self.monitor.retain(models)
        self.detectors.retain(models)

    # --- what the group reports --------------------------------------------------------------------------------

    def recovery_enabled(self) -> None:
        """From now on a failure is to be survived."""
        self.strategy.enable_recovery()

    def group_rebuilt(self) -> None:
        """After a new generation: attach the models to it, and give up the open window."""
        self.strategy.restart()
        for model in self.models:
            self.strategy.reattach(model)
        for model in self.given_up:
            self.strategy.detach(model)
        self.accumulation.reset()
