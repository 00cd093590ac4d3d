"""How much of a traceback the failure screen shows: one setting, read by the launcher and by each rank."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.config.resolve import resolve
from lockstep.errors import ConfigError

CHOICES = ("short", "full")


def read_traceback(environ: Mapping[str, str]) -> str:
    """ "short", the user's own frames, or "full", those of libraries as well."""
    value: str = resolve("traceback", None, "short", environ, _parse).value
    return value


def _parse(text: str, name: str) -> str:
    value = text.strip().lower() or "short"
    if value not in CHOICES:
        raise ConfigError(f"{name}={text!r} is not allowed. Allowed: {', '.join(CHOICES)}.")
    return value
