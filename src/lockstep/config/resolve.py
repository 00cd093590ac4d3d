"""Where each value comes from: argument, then environment, then default; the answer carries its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lockstep.config import env

Value = TypeVar("Value")


@dataclass(frozen=True)
class Resolved(Generic[Value]):
    """A setting's value and the place that decided it."""

    value: Value
    """What is in force."""
    source: str
    """Where it came from, in words: "argument", "environment (NAME)", "default"."""


def resolve(
    setting: str,
    argument: Value | None,
    default: Value,
    environ: Mapping[str, str],
    parse: Callable[[str, str], Value],
) -> Resolved[Value]:
    """The value of ``setting``: the argument when given, else the environment, else the default."""
    if argument is not None:
        return Resolved(argument, "argument")
    found = env.lookup(setting, environ)
    if found is not None:
        name, text = found
        return Resolved(parse(text, name), f"environment ({name})")
    return Resolved(default, "default")


def as_text(text: str, name: str) -> Any:
    """The parser of settings that are text already."""
    return text
