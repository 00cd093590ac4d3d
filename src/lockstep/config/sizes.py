"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import operator
import re
from typing import Any

from lockstep.errors import ConfigError

_SIZE = re.compile(r"\s*(\d+\.?\d*(?:E[+-]?\d+)?)\s*([KMGT]?)(I?)(B?)\s*", re.ASCII)


def in_bytes(value: int | str, name: str) -> int:
    """A size that is given as a number of bytes, or as a text such as ``10GiB``."""
    size = _parse(value)
    if size is None:
        raise ConfigError(
            f"{name}={value!r} is not a size. Give bytes as a whole number, or a text such as '10GiB' or '200MB'."
        )
    return size


def shard_size(size: int | str) -> int:
    """The same for model files, where Accelerate asks for a unit."""
    result = _parse(size)
    if result is None or (isinstance(size, str) and not re.search("[KMGT]I?B", size.upper())):
        raise ConfigError(
            f"The size {size!r} cannot be used. Give a number of bytes, or a number with a unit: KB, MB, GB, TB "
            '(powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), such as "5GB".'
        )
    return result


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes in a size such as ``"5GB"`` or ``"1.5MiB"``; as in Accelerate, ``"8Gb"`` with a small b counts bits."""
    bits = isinstance(size, str) and size.rstrip().endswith("b") and not size.upper().rstrip().endswith("IB")
    return shard_size(size) // (8 if bits else 1)


def _parse(value: int | str) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _SIZE.fullmatch(value.upper()) if isinstance(value, str) else None
    if found is None:
        return None
    number, prefix, binary, _ = found.groups()
    try:
        return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))
    except OverflowError:
        return None


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


def convert_bytes(size: float) -> str:
    """A number of bytes as people read it: ``1.5 KB``. A unit is 1024 of the one before."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"
