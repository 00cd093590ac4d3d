"""The option objects users build and hand to ``Accelerator``: each checks itself when it is made and when it changes.

Without ``__eq__``: nobody compares them, and generating it for a dozen classes takes time from every import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from lockstep.config.choices import DDPCommunicationHookType, DynamoBackend, TailDivisor
from lockstep.errors import ConfigError


def _check_flags(options: Any) -> None:
    for option in fields(options):
        value = getattr(options, option.name)
        if isinstance(option.default, bool) and not isinstance(value, bool):
            raise ConfigError(f"{type(options).__name__}.{option.name}={value!r} must be True or False.")


class Options:
    """What all of them have in common: an option that is changed is checked, and one that comes too late says so."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = [option.name for option in fields(self)]  # type: ignore[arg-type]
        if name not in known:
            raise ConfigError(f"{type(self).__name__} has no option {name!r}. Allowed: {', '.join(known)}.")
        if "_used" in self.__dict__:
            raise ConfigError(
                f"{type(self).__name__}.{name}={value!r} comes too late: an Accelerator was made with it and has used "
                "it. Set it before, or hand a new one to a new Accelerator."
            )
        first = name not in self.__dict__
        before = self.__dict__.get(name)
        object.__setattr__(self, name, value)
        if not first:
            try:
                self.__post_init__()
            except ConfigError:
                object.__setattr__(self, name, before)
                raise

    def __post_init__(self) -> None:
        _check_flags(self)

    def use(self) -> None:
        """From now on a change would have no effect."""
        object.__setattr__(self, "_used", True)


@dataclass(eq=False)
class KwargsHandler(Options):
    """Options for one part of PyTorch; at most one of each kind goes into ``kwargs_handlers``."""

    def to_kwargs(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        default = type(self)()
        return {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if getattr(self, option.name) != getattr(default, option.name)
        }


@dataclass(eq=False)
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast`` in mixed precision."""

    enabled: bool = True
    """Whether the region casts at all."""
    cache_enabled: bool | None = None
    """Whether cast weights are kept for the length of the region; None leaves it to torch."""


@dataclass(eq=False)
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of ``torch.nn.parallel.DistributedDataParallel``."""

    dim: int = 0
    """The batch dimension."""
    broadcast_buffers: bool = True
    """Whether rank 0's buffers (batch norm statistics) are sent to all at each forward."""
    bucket_cap_mb: int = 25
    """Size of the gradient buckets."""
    find_unused_parameters: bool = False
    """Whether parameters may take no part in a forward."""
    check_reduction: bool = False
    """Kept for old scripts; torch removed what it did, so only False is possible."""
    gradient_as_bucket_view: bool = False
    """Whether ``param.grad`` shares memory with the buckets."""
    static_graph: bool = False
    """Whether the graph is the same at each step."""
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """How gradients are compressed on the way."""
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    """fp16 or bf16: the compression around ``comm_hook``."""
    comm_state_option: Mapping[str, Any] = field(default_factory=dict)
    """Options of PowerSGD's state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hook = DDPCommunicationHookType.parse(self.comm_hook, "DistributedDataParallelKwargs.comm_hook")
        wrapper = DDPCommunicationHookType.parse(self.comm_wrapper, "DistributedDataParallelKwargs.comm_wrapper")
        object.__setattr__(self, "comm_hook", hook)
        object.__setattr__(self, "comm_wrapper", wrapper)
        wrappers = (DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)
        if wrapper not in wrappers:
            raise ConfigError(
                f"DistributedDataParallelKwargs.comm_wrapper={wrapper.value!r} cannot wrap a hook. "
                "Allowed: 'no', 'fp16', 'bf16'."
            )
        if wrapper is not DDPCommunicationHookType.NO and hook is DDPCommunicationHookType.NO:
            raise ConfigError(
                f"DistributedDataParallelKwargs.comm_wrapper={wrapper.value!r} wraps a comm_hook, and comm_hook is "
                "'no'. Set comm_hook, or leave comm_wrapper out."
            )
        if self.check_reduction:
            raise ConfigError(
                "DistributedDataParallelKwargs.check_reduction=True has no meaning any more: "
                "torch always checks the reduction. Leave it out."
            )


@dataclass(eq=False)
class GradScalerKwargs(KwargsHandler):
    """Options of ``torch.amp.GradScaler``, the loss scaling of fp16."""

    init_scale: float = 65536.0
    """The first scale."""
    growth_factor: float = 2.0
    """What the scale is multiplied with after ``growth_interval`` good steps."""
    backoff_factor: float = 0.5
    """What the scale is multiplied with after an overflow."""
    growth_interval: int = 2000
    """How many good steps it takes to grow."""
    enabled: bool = True
    """Whether losses are scaled at all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        inf = float("inf")
        for name, low, high, allowed in (
            ("init_scale", 0, inf, "a number above 0"),
            ("growth_factor", 1, inf, "a number above 1"),
            ("backoff_factor", 0, 1, "a number between 0 and 1"),
            ("growth_interval", 0, inf, "a whole number of at least 1"),
        ):
            value = getattr(self, name)
            number = isinstance(value, int if name == "growth_interval" else (int, float))
            if not number or isinstance(value, bool) or not low < value < high:
                raise ConfigError(f"GradScalerKwargs.{name}={value!r} must be {allowed}.")


@dataclass(eq=False)
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the process group."""

    backend: str | None = None
    """gloo, nccl, …; None picks the one that belongs to the device."""
    init_method: str | None = None
    """A rendezvous URL; None uses the address that the launcher gave."""
    timeout: timedelta | None = None
    """How long a collective may wait before it fails; None is torch's default (30 minutes)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool):
            object.__setattr__(self, "timeout", timedelta(seconds=self.timeout))
        if self.timeout is not None and not isinstance(self.timeout, timedelta):
            raise ConfigError(
                f"InitProcessGroupKwargs.timeout={self.timeout!r} is not a duration. "
                "Give a datetime.timedelta or a number of seconds."
            )
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ConfigError(f"InitProcessGroupKwargs.timeout={self.timeout} must be above zero.")


@dataclass(eq=False)
class ProfileKwargs(KwargsHandler):
    """Options of ``torch.profiler.profile`` for ``accelerator.profile()``."""

    activities: list[str] | None = None
    """"cpu", "cuda", "xpu", …; None records what torch records by default."""
    schedule_option: Mapping[str, int] | None = None
    """Arguments of ``torch.profiler.schedule`` (wait, warmup, active, repeat, skip_first)."""
    on_trace_ready: Callable[..., Any] | None = None
    """Called when a trace is ready."""
    record_shapes: bool = False
    """Whether input shapes are recorded."""
    profile_memory: bool = False
    """Whether allocations are recorded."""
    with_stack: bool = False
    """Whether source lines are recorded."""
    with_flops: bool = False
    """Whether floating point operations are estimated."""
    with_modules: bool = False
    """Whether module names are recorded."""
    output_trace_dir: str | None = None
    """Where each rank's Chrome trace is written (profile_RANK.json)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activities is None:
            return
        from torch.profiler import ProfilerActivity

        known = [name.lower() for name in ProfilerActivity.__members__]
        unknown = [name for name in self.activities if name not in known]
        if unknown:
            raise ConfigError(f"ProfileKwargs.activities holds {unknown}. Allowed: {', '.join(known)}.")


@dataclass(eq=False)
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated over micro-batches."""

    num_steps: int | None = None
    """Micro-batches per update; None means 1."""
    adjust_scheduler: bool = True
    """Whether a prepared scheduler counts the micro-batches it does not step on."""
    sync_with_dataloader: bool = True
    """Whether the end of the loader closes the window."""
    sync_each_batch: bool = False
    """Whether gradients travel at each micro-batch (less memory under sharding, more traffic)."""
    tail_divisor: TailDivisor = TailDivisor.PRESENT
    """What the incomplete window at the end of an epoch is averaged over: the micro-batches it has ("present"),
    or the full window ("window", Accelerate's arithmetic)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps is not None:
            check_steps(self.num_steps, "GradientAccumulationPlugin.num_steps")
        tail = TailDivisor.parse(self.tail_divisor, "GradientAccumulationPlugin.tail_divisor")
        object.__setattr__(self, "tail_divisor", tail)


def check_steps(value: Any, name: str) -> int:
    """A number of micro-batches per update: a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")
    return value


@dataclass(eq=False)
class DataLoaderConfiguration(Options):
    """How prepared loaders share data between ranks."""

    split_batches: bool = False
    """Whether the loader's batch is cut between ranks (True), or is each rank's own size (False)."""
    dispatch_batches: bool | None = None
    """Whether rank 0 reads for all. None: for iterable datasets, whose stream may differ between ranks."""
    even_batches: bool = True
    """Whether samples are repeated at the end so that all ranks get equally many batches."""
    use_seedable_sampler: bool = False
    """Whether the shuffled order is a function of seed and epoch alone."""
    data_seed: int | None = None
    """The seed of that order; None takes torch's initial seed."""
    non_blocking: bool = False
    """Whether batches are copied to the device without waiting (useful with pinned memory)."""
    use_stateful_dataloader: bool = False
    """Whether torchdata's StatefulDataLoader reads, which also keeps an iterable dataset's own state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_seed is not None and not self.use_seedable_sampler:
            raise ConfigError(
                f"DataLoaderConfiguration.data_seed={self.data_seed} has no effect without "
                "use_seedable_sampler=True. Set both, or neither."
            )


@dataclass
class ProjectConfiguration:
    """Where a project keeps its files."""

    project_dir: str | None = None
    """The folder for checkpoints and logs."""
    logging_dir: str | None = None
    """The folder for trackers' logs; None is ``project_dir``."""
    automatic_checkpoint_naming: bool = False
    """Whether checkpoints are numbered under ``project_dir/checkpoints``."""
    total_limit: int | None = None
    """How many checkpoints are kept."""
    iteration: int = 0
    """The number of the next checkpoint."""
    save_on_each_node: bool = False
    """Whether each node writes the files it has in common with the others."""

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[Any] | None = None) -> None:
        """Set the project folder, and the logging folder where none was given."""
        self.project_dir = None if project_dir is None else str(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir


@dataclass(eq=False)
class TorchDynamoPlugin(KwargsHandler):
    """Options of ``torch.compile`` for prepared models."""

    backend: DynamoBackend | str | None = None
    """The compiler; None or "no" does not compile."""
    mode: str | None = None
    """"default", "reduce-overhead" or "max-autotune"."""
    fullgraph: bool | None = None
    """Whether a break in the graph is an error."""
    dynamic: bool | None = None
    """Whether shapes are taken as variable."""
    options: Any = None
    """Options handed to the backend."""
    disable: bool = False
    """Whether torch.compile does nothing (for testing)."""
    use_regional_compilation: bool | None = None
    """Whether only the repeated blocks (children of ``nn.ModuleList``) are compiled, which starts sooner."""

    def __post_init__(self) -> None:
        super().__post_init__()
        backend = DynamoBackend.NO if self.backend is None else self.backend
        object.__setattr__(self, "backend", DynamoBackend.parse(backend, "dynamo_backend"))

    @property
    def wanted(self) -> bool:
        """Whether models are compiled at all."""
        return self.backend is not DynamoBackend.NO

    def compile_kwargs(self) -> dict[str, Any]:
        """The arguments for ``torch.compile``."""
        chosen = {"mode": self.mode, "dynamic": self.dynamic, "options": self.options}
        return {
            "backend": str(self.backend).lower(),
            "fullgraph": bool(self.fullgraph),
            "disable": self.disable,
            **{name: value for name, value in chosen.items() if value is not None},
        }


def sort_handlers(handlers: Iterable[Any] | None) -> dict[type[KwargsHandler], KwargsHandler]:
    """The handlers by kind; a stranger or a second one of a kind is an error that names it."""
    allowed = (
        AutocastKwargs,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    if handlers is not None and not isinstance(handlers, Iterable):
        raise ConfigError(f"kwargs_handlers={handlers!r} must be a list of option objects.")
    sorted_handlers: dict[type[KwargsHandler], KwargsHandler] = {}
    for handler in handlers or ():
        kind = next((kind for kind in allowed if isinstance(handler, kind)), None)
        if kind is None:
            names = ", ".join(kind.__name__ for kind in allowed)
            raise ConfigError(f"kwargs_handlers holds a {type(handler).__name__}, which is none of: {names}.")
        if kind in sorted_handlers:
            raise ConfigError(f"kwargs_handlers holds two {kind.__name__}; merge them into one.")
        sorted_handlers[kind] = handler
    return sorted_handlers
