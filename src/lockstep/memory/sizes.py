"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import operator
import re
from typing import Any

from lockstep.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def in_bytes(value: int | str, name: str) -> int:
    """A size that is given as a number of bytes, or as a text such as ``10GiB``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(
            f"{name}={value!r} is not a size. Give bytes as a whole number, or a text such as '10GiB' or '200MB'."
        )
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** _POWERS[found[2].upper()])


def in_words(size: float) -> str:
    """A number of bytes as people read it: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def check_size(value: Any, name: str) -> int:
    """A batch size: a whole number of at least 1."""
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if isinstance(value, bool) or size < 1:
        raise ConfigError(f"{name}={value!r} is no batch size. Give a whole number of at least 1.")
    return size
