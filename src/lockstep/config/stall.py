"""How long a rank may wait before that is reported: one setting of the guard, read in every process that waits."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.config import env
from lockstep.config.resolve import resolve

STALL_SECONDS = 30.0
"""The default."""


def read_stall_seconds(environ: Mapping[str, str]) -> float:
    """Seconds after which a wait that may still end is reported."""
    return resolve(
        "stall_seconds", None, STALL_SECONDS, environ, lambda text, name: float(env.parse_int(text, name))
    ).value
