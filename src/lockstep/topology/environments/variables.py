"""Reading single variables: the same words for the same mistake, whichever launcher made it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from lockstep.errors import TopologyError

# More digits than any count, port or SLURM id has; int() itself refuses very long texts with words of its own.
_DIGITS = 19


def text(environ: Mapping[str, str], *names: str) -> str | None:
    """The first of these variables that holds something; an empty one counts as not set."""
    for name in names:
        value = environ.get(name, "").strip()
        if value:
            return value
    return None


def number(environ: Mapping[str, str], *names: str, low: int = 0, high: int | None = None) -> int | None:
    """The first of these variables that is set, as a whole number; None when none is.

    An empty text is an error here, unlike in `text`: ``RANK=$TYPO`` must not pass for "no RANK".
    """
    for name in names:
        if name in environ:
            return _parse(name, environ[name], low, high)
    return None


def needed(environ: Mapping[str, str], *names: str, by: str, low: int = 0, high: int | None = None) -> int:
    """Like `number`, but the variable has to be there; ``by`` says who sets it."""
    value = number(environ, *names, low=low, high=high)
    if value is None:
        raise TopologyError(
            f"{' or '.join(names)} is not set, although other variables of {by} are. "
            f"{by} sets it for each process; pass it on, or set it by hand."
        )
    return value


def _parse(name: str, value: str, low: int, high: int | None) -> int:
    digits = value.strip()
    # int() would also take "1_0", "+1" and digits of other scripts, which no launcher writes.
    if digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS:
        parsed = int(digits)
        if low <= parsed and (high is None or parsed <= high):
            return parsed
    allowed = f"{low} or more" if high is None else f"from {low} to {high}"
    shown = value if len(value) <= 60 else value[:57] + "..."
    raise TopologyError(
        f"{name} is {shown!r}. Allowed: a whole number, {allowed}. "
        f"Correct or unset {name} where this process is started."
    )


def seen(environ: Mapping[str, str], *names: str) -> str:
    """Those of the variables that are set, with their values: ``A=1, B=2 and C=3``."""
    parts = [f"{name}={environ[name]}" for name in names if name in environ]
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def main_address(environ: Mapping[str, str]) -> str | None:
    """Where rank 0's store is, if somebody said so."""
    return text(environ, "MASTER_ADDR")


def main_port(environ: Mapping[str, str]) -> int | None:
    """The port of rank 0's store, if somebody said so."""
    if text(environ, "MASTER_PORT") is None:
        return None
    return number(environ, "MASTER_PORT", low=1, high=65535)


def derived_port(*job: str) -> int:
    """A port from 20000 to 29999 that every process of a job computes alike and two jobs hardly ever share.

    Not ``hash()``: that differs from process to process. The range lies below the ports Linux gives to
    outgoing connections (32768 and up), so that a passing connection does not occupy it.
    """
    digest = hashlib.sha256("\0".join(job).encode()).digest()
    return 20000 + int.from_bytes(digest[:8], "big") % 10000
