"""Everything an Accelerator was asked for, checked in one go before any process group is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lockstep.config import env
from lockstep.config.choices import (
    DDPCommunicationHookType,
    DebugTool,
    DynamoBackend,
    NanPolicy,
    PrecisionType,
    RNGType,
    SchedulerUnit,
    TailDivisor,
)
from lockstep.config.handlers import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    Options,
    ProjectConfiguration,
    TorchDynamoPlugin,
    check_steps,
    sort_handlers,
)
from lockstep.config.recording import NumericsRecord, read_recording
from lockstep.config.resolve import resolve
from lockstep.errors import ConfigError, NotYetError

Value = TypeVar("Value")
Handler = TypeVar("Handler", bound=KwargsHandler)


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """What is in force for one Accelerator."""

    device_placement: bool
    """Whether models and batches are moved to the device."""
    cpu: bool | None
    """Whether the CPU is used even where an accelerator is present; None when nothing was said."""
    mixed_precision: PrecisionType | None
    """Precision of the forward pass; None when nothing was said."""
    precision_source: str
    """Where the precision came from."""
    accumulation: GradientAccumulationPlugin
    """How gradients are accumulated."""
    data: DataLoaderConfiguration
    """How loaders are shared."""
    project: ProjectConfiguration
    """Where files go."""
    handlers: Mapping[type[KwargsHandler], KwargsHandler]
    """Options for parts of torch."""
    dynamo: TorchDynamoPlugin
    """How models are compiled."""
    rng_types: tuple[RNGType, ...]
    """Generators put in step at each start of a loader."""
    step_with_optimizer: bool
    """Whether a prepared scheduler follows the optimizer."""
    scheduler_unit: SchedulerUnit
    """What one scheduler step means."""
    debug: frozenset[DebugTool]
    """Checks that are switched on."""
    numerics_record: NumericsRecord | None
    """Which batches' numbers are recorded, and where; None for none."""
    nan_policy: NanPolicy
    """What is done about a loss or gradient that is NaN or infinite."""
    reproducible: bool
    """Whether parameters are to come out the same on any number of processes."""
    save_on_signal: bool
    """Whether SIGTERM and SIGUSR1 save the state and end the job."""
    trackers: Any
    """The experiment trackers; None for none."""

    def handler(self, kind: type[Handler]) -> Handler:
        """The options of one kind, or their defaults."""
        return self.handlers.get(kind) or kind()  # type: ignore[return-value]


class _Problems:
    """Collects what is wrong, so that the user hears of all of it at once."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    def attempt(self, read: Callable[[], Value], instead: Value) -> Value:
        try:
            return read()
        except ConfigError as error:
            self.found += [ConfigError(problem) for problem in error.problems] or [error]
            return instead

    def refuse(self, given: bool, text: str) -> None:
        if given:
            self.found.append(NotYetError(text))

    def raise_any(self) -> None:
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise ConfigError.of([str(problem) for problem in self.found])


def read_settings(
    environ: Mapping[str, str],
    *,
    device_placement: bool,
    split_batches: bool | None,
    mixed_precision: Any,
    gradient_accumulation_steps: int | None,
    cpu: bool | None,
    dataloader_config: DataLoaderConfiguration | None,
    rng_types: Iterable[Any] | None,
    project_dir: Any,
    project_config: ProjectConfiguration | None,
    gradient_accumulation_plugin: GradientAccumulationPlugin | None,
    step_scheduler_with_optimizer: bool | None,
    step_with_optimizer: bool | None,
    kwargs_handlers: Iterable[Any] | None,
    dynamo_backend: Any,
    dynamo_plugin: TorchDynamoPlugin | None,
    scheduler_unit: Any,
    debug: Any,
    nan_policy: Any,
    reproducible: bool | None,
    save_on_signal: bool | None,
    read_trackers: Callable[[str | None], Any],
    not_built: Mapping[str, Any],
) -> Settings:
    """Check every argument and variable; raise once for all that cannot be honoured."""
    problems = _Problems()
    for name, value in not_built.items():
        problems.refuse(value is not None, f"{name}={value!r} is not supported yet. Leave it out.")
    for name, engine in env.UNBUILT.items():
        asked = name in environ and problems.attempt(lambda name=name: env.parse_flag(environ[name], name), False)  # type: ignore[misc]
        problems.refuse(asked, f"{name}={environ.get(name)!r} asks for {engine}, which is not supported yet. Unset it.")
    if device_placement is None:
        problems.found.append(ConfigError("device_placement=None must be True or False."))
    for name, flag in (
        ("device_placement", device_placement),
        ("split_batches", split_batches),
        ("cpu", cpu),
        ("reproducible", reproducible),
        ("save_on_signal", save_on_signal),
    ):
        problems.attempt(lambda name=name, flag=flag: _flag(name, flag), None)  # type: ignore[misc]
    precision = problems.attempt(
        lambda: resolve("mixed_precision", read_precision(mixed_precision), None, environ, read_precision), None
    )
    same_everywhere = problems.attempt(
        lambda: resolve("reproducible", reproducible, False, environ, env.parse_flag).value, False
    )
    mode = None if precision is None else precision.value
    settings = Settings(
        device_placement=device_placement,
        cpu=cpu,
        # Said aloud in that mode, so that a precision which an earlier Accelerator settled is refused.
        mixed_precision=PrecisionType.NO if mode is None and same_everywhere else mode,
        precision_source="default" if precision is None else precision.source,
        accumulation=problems.attempt(
            lambda: _accumulation(gradient_accumulation_steps, gradient_accumulation_plugin, environ),
            GradientAccumulationPlugin(),
        ),
        data=problems.attempt(
            lambda: _data(split_batches, dataloader_config, seedable=same_everywhere), DataLoaderConfiguration()
        ),
        project=problems.attempt(lambda: _project(project_dir, project_config), ProjectConfiguration()),
        handlers=problems.attempt(lambda: sort_handlers(kwargs_handlers), {}),
        dynamo=problems.attempt(lambda: _dynamo(dynamo_backend, dynamo_plugin, environ), TorchDynamoPlugin()),
        rng_types=problems.attempt(lambda: _rng(rng_types), ()),
        step_with_optimizer=problems.attempt(
            lambda: _with_optimizer(step_scheduler_with_optimizer, step_with_optimizer), True
        ),
        scheduler_unit=problems.attempt(
            lambda: SchedulerUnit.parse(scheduler_unit, "scheduler_unit"), SchedulerUnit.PROCESS
        ),
        debug=problems.attempt(lambda: read_debug(debug, environ), frozenset()),
        numerics_record=problems.attempt(lambda: read_recording(environ), None),
        nan_policy=problems.attempt(lambda: read_nan_policy(nan_policy, environ), NanPolicy.WARN),
        reproducible=same_everywhere is True,
        save_on_signal=problems.attempt(
            lambda: resolve("save_on_signal", save_on_signal, False, environ, env.parse_flag).value, False
        )
        is True,
        trackers=None,
    )
    settings = replace(settings, trackers=problems.attempt(lambda: read_trackers(settings.project.logging_dir), None))
    if settings.reproducible:
        problems.found += _not_reproducible(settings)
    if settings.save_on_signal and not (settings.project.automatic_checkpoint_naming and settings.project.project_dir):
        problems.found.append(
            ConfigError(
                "save_on_signal=True needs a place to save to. Pass project_config=ProjectConfiguration(project_dir=…, "
                "automatic_checkpoint_naming=True)."
            )
        )
    problems.raise_any()
    used: list[Options | None] = [gradient_accumulation_plugin]
    used += [settings.handlers.get(kind) for kind in (InitProcessGroupKwargs, GradScalerKwargs)]
    if same_everywhere:
        used += [dataloader_config, settings.data]
    for options in used:
        if options is not None:
            options.use()
    return settings


def _flag(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False.")


def read_precision(value: Any, name: str = "mixed_precision") -> PrecisionType | None:
    """The precision asked for, under this name; None when nothing was said."""
    mode = None if value is None else PrecisionType.parse(value, name)
    if mode is PrecisionType.FP8:
        raise NotYetError(f"{name}='fp8' is not supported yet. Allowed: 'no', 'fp16', 'bf16'.")
    return mode


def _accumulation(
    steps: int | None, plugin: GradientAccumulationPlugin | None, environ: Mapping[str, str]
) -> GradientAccumulationPlugin:
    if steps is not None:
        check_steps(steps, "gradient_accumulation_steps")
    if plugin is not None:
        _kind("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
        if steps not in (None, 1, plugin.num_steps):
            raise ConfigError(
                f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin.num_steps={plugin.num_steps} "
                "are both set. Give one of them."
            )
        steps = plugin.num_steps if plugin.num_steps is not None else steps
    found = resolve("gradient_accumulation_steps", steps, 1, environ, _steps)
    return replace(plugin or GradientAccumulationPlugin(), num_steps=found.value)


def _steps(text: str, name: str) -> int:
    return check_steps(env.parse_int(text, name), name)


def _kind(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is a {type(value).__name__}. Give a {kind.__name__}.")


def _data(
    split_batches: bool | None, options: DataLoaderConfiguration | None, *, seedable: bool
) -> DataLoaderConfiguration:
    if options is None:
        return DataLoaderConfiguration(split_batches=bool(split_batches), use_seedable_sampler=bool(seedable))
    _kind("dataloader_config", options, DataLoaderConfiguration)
    if split_batches is not None and split_batches != options.split_batches:
        raise ConfigError(
            f"split_batches={split_batches} contradicts dataloader_config.split_batches={options.split_batches}. "
            "Give one of them."
        )
    return replace(options, use_seedable_sampler=True) if seedable else options


def _project(project_dir: Any, options: ProjectConfiguration | None) -> ProjectConfiguration:
    if project_dir is not None and not isinstance(project_dir, (str, os.PathLike)):
        raise ConfigError(f"project_dir={project_dir!r} is not a path. Give a str or a pathlib.Path.")
    if options is None:
        return ProjectConfiguration(project_dir=None if project_dir is None else str(project_dir))
    _kind("project_config", options, ProjectConfiguration)
    if project_dir is not None:
        if options.project_dir not in (None, str(project_dir)):
            raise ConfigError(
                f"project_dir={project_dir!r} contradicts project_config.project_dir={options.project_dir!r}. "
                "Give one of them."
            )
        options.set_directories(project_dir)
    return options


def _dynamo(backend: Any, plugin: TorchDynamoPlugin | None, environ: Mapping[str, str]) -> TorchDynamoPlugin:
    if plugin is not None:
        _kind("dynamo_plugin", plugin, TorchDynamoPlugin)
        if backend is not None:
            raise ConfigError(f"dynamo_backend={backend!r} and dynamo_plugin are both set. Give one of them.")
        return plugin
    compiler = resolve("dynamo_backend", backend, DynamoBackend.NO, environ, DynamoBackend.parse).value

    def flag(setting: str) -> bool | None:
        return resolve(setting, None, None, environ, env.parse_flag).value

    return TorchDynamoPlugin(
        backend=compiler,
        mode=resolve("dynamo_mode", None, None, environ, lambda text, _: text).value,
        fullgraph=flag("dynamo_use_fullgraph"),
        dynamic=flag("dynamo_use_dynamic"),
        use_regional_compilation=flag("dynamo_use_regional_compilation"),
    )


def _not_reproducible(settings: Settings) -> list[ConfigError]:
    """What was asked for that makes results depend on how many processes there are."""
    return [
        ConfigError(f"reproducible=True cannot be kept with {what}. Leave one of them out.")
        for given, what in (
            (
                settings.mixed_precision not in (None, PrecisionType.NO),
                f"mixed_precision={str(settings.mixed_precision)!r}, which rounds more coarsely than it promises",
            ),
            (
                not settings.data.even_batches,
                "even_batches=False, with which some ranks make fewer updates",
            ),
            (
                settings.accumulation.tail_divisor is TailDivisor.WINDOW,
                "tail_divisor='window', with which the last samples of an epoch count less",
            ),
            (
                not settings.accumulation.sync_with_dataloader,
                "sync_with_dataloader=False, with which an update can hold samples of two epochs",
            ),
            (
                settings.handler(DistributedDataParallelKwargs).comm_hook is not DDPCommunicationHookType.NO,
                "a DistributedDataParallelKwargs.comm_hook, which rounds gradients on their way",
            ),
        )
        if given
    ]


def _rng(types: Iterable[Any] | None) -> tuple[RNGType, ...]:
    if types is None:
        return (RNGType.GENERATOR,)
    if isinstance(types, str) or not isinstance(types, Iterable):
        raise ConfigError(f"rng_types={types!r} must be a list, such as ['generator', 'torch'].")
    return tuple(RNGType.parse(kind, "rng_types") for kind in types)


def _with_optimizer(known: bool | None, guides: bool | None) -> bool:
    if known is not None and guides is not None and known != guides:
        raise ConfigError(
            f"step_scheduler_with_optimizer={known} contradicts step_with_optimizer={guides}: they are two names of "
            "one setting. Give one of them."
        )
    for name, value in (("step_scheduler_with_optimizer", known), ("step_with_optimizer", guides)):
        _flag(name, value)
    return next((value for value in (known, guides) if value is not None), True)


def read_nan_policy(argument: Any, environ: Mapping[str, str]) -> NanPolicy:
    """What is to be done about NaN and inf, from the argument or the environment."""
    asked = None if argument is None else NanPolicy.parse(argument, "nan_policy")
    return resolve("nan_policy", asked, NanPolicy.WARN, environ, NanPolicy.parse).value


def read_debug(argument: Any, environ: Mapping[str, str]) -> frozenset[DebugTool]:
    """The debug tools in force, from the argument or the environment."""
    return resolve("debug", parse_debug(argument, "debug"), frozenset(), environ, _debug_text).value


def parse_debug(value: Any, name: str) -> frozenset[DebugTool] | None:
    """The debug tools asked for: True, False, a tool's name, or a list of names; None when nothing was said."""
    if value is None:
        return None
    if isinstance(value, bool):
        return frozenset((DebugTool.COLLECTIVES,)) if value else frozenset()
    names = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    return frozenset(DebugTool.parse(tool, name) for tool in names)


def _debug_text(text: str, name: str) -> frozenset[DebugTool]:
    try:
        return parse_debug(env.parse_flag(text, name), name) or frozenset()
    except ConfigError:
        return parse_debug([part.strip() for part in text.split(",")], name) or frozenset()
