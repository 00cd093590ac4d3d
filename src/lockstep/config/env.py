"""The only file that touches the process environment.

One table relates settings to the variables that carry them. The first name of a row is ours; the others are the
names Accelerate reads, so that a job set up for it keeps its settings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lockstep.errors import ConfigError

VARIABLES: dict[str, tuple[str, ...]] = {
    "cpu": ("LOCKSTEP_USE_CPU", "ACCELERATE_USE_CPU"),
    "device": ("LOCKSTEP_TORCH_DEVICE", "ACCELERATE_TORCH_DEVICE"),
    "mixed_precision": ("LOCKSTEP_MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION"),
    "gradient_accumulation_steps": (
        "LOCKSTEP_GRADIENT_ACCUMULATION_STEPS",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    ),
    "reproducible": ("LOCKSTEP_REPRODUCIBLE",),
    "save_on_signal": ("LOCKSTEP_SAVE_ON_SIGNAL",),
    "debug": ("LOCKSTEP_DEBUG_MODE", "ACCELERATE_DEBUG_MODE"),
    "numerics_record": ("LOCKSTEP_NUMERICS_RECORD",),
    "nan_policy": ("LOCKSTEP_NAN_POLICY",),
    "stall_seconds": ("LOCKSTEP_STALL_SECONDS",),
    "replica_check_steps": ("LOCKSTEP_REPLICA_CHECK_STEPS",),
    "traceback": ("LOCKSTEP_TRACEBACK",),
    "log_level": ("LOCKSTEP_LOG_LEVEL", "ACCELERATE_LOG_LEVEL"),
    "dynamo_backend": ("LOCKSTEP_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_BACKEND"),
    "dynamo_mode": ("LOCKSTEP_DYNAMO_MODE", "ACCELERATE_DYNAMO_MODE"),
    "dynamo_use_fullgraph": ("LOCKSTEP_DYNAMO_USE_FULLGRAPH", "ACCELERATE_DYNAMO_USE_FULLGRAPH"),
    "dynamo_use_dynamic": ("LOCKSTEP_DYNAMO_USE_DYNAMIC", "ACCELERATE_DYNAMO_USE_DYNAMIC"),
    "dynamo_use_regional_compilation": (
        "LOCKSTEP_DYNAMO_USE_REGIONAL_COMPILATION",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    ),
    "init_include_buffers": ("LOCKSTEP_INIT_INCLUDE_BUFFERS", "ACCELERATE_INIT_INCLUDE_BUFFERS"),
}
"""Setting -> the variables that can carry it, in order of precedence."""

MEANINGS: dict[str, str] = {
    "device": "device of this process, such as cuda:1",
    "reproducible": "the same parameters on any number of processes",
    "save_on_signal": "save the state on SIGTERM and SIGUSR1, then end the job",
    "nan_policy": "what happens at a loss or gradient that is NaN or inf: warn, skip, stop or off",
    "traceback": "`short`: the failure screen has the lines of the script; `full`: those of libraries as well",
    "stall_seconds": "seconds after which the guard reports a wait that may still end",
    "replica_check_steps": "optimizer steps between two comparisons of the ranks' weights; 0 for none",
    "log_level": "level of the library's log lines",
    "init_include_buffers": "leave buffers without values too, under init_empty_weights",
}
"""What the settings mean that no flag of ``lockstep launch`` sets."""

UNBUILT: dict[str, str] = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "ParallelismConfig",
}
"""Switches that ask for an engine this release does not have."""

_TRUE = frozenset(("1", "true", "yes", "y", "t", "on"))
_FALSE = frozenset(("0", "false", "no", "n", "f", "off", ""))


def snapshot() -> Mapping[str, str]:
    """The environment as it is now, as a value that no longer changes."""
    return dict(os.environ)


def lookup(setting: str, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable that sets ``setting`` and its text, or None when none does."""
    for name in VARIABLES[setting]:
        if name in environ:
            return name, environ[name]
    return None


def parse_flag(text: str, name: str) -> bool:
    """A yes-or-no variable; anything else is an error that lists what counts."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ConfigError(f"{name}={text!r} is neither yes nor no. Allowed: 1, true, yes, on, 0, false, no, off.")


def parse_int(text: str, name: str) -> int:
    """A whole number; anything else is an error that names the variable."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a whole number.") from None


def error_file(environ: Mapping[str, str]) -> str | None:
    """Where torchrun looks for what ended this rank; None where it did not start it."""
    return None if "LOCKSTEP_LAUNCH" in environ else environ.get("TORCHELASTIC_ERROR_FILE") or None


def publish(changes: Mapping[str, str]) -> None:
    """Set variables for good: what processes that are started from here on find."""
    os.environ.update(changes)


def withdraw(name: str) -> None:
    """Take back what was published."""
    os.environ.pop(name, None)


@contextmanager
def patched(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set (or, with None, remove) variables for the length of a block, then put back what was there."""
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


def _apply(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
