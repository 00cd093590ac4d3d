"""Sizes as people write them."""

from __future__ import annotations

import re

from lockstep.errors import ConfigError

_UNITS = {
    **{f"{letter}IB": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMGT", 1)},
}


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes in a size such as ``"5GB"`` or ``"1.5MiB"``; as in Accelerate, ``"8Gb"`` with a small b counts bits."""
    bits = isinstance(size, str) and size.rstrip().endswith("b") and not size.upper().rstrip().endswith("IB")
    return shard_size(size) // (8 if bits else 1)


def shard_size(size: int | str) -> int:
    """The same where the unit counts bytes however it is written, as it does for shards in Accelerate."""
    try:
        if isinstance(size, int):
            result = size
        else:
            number, unit = re.fullmatch(r"\s*([0-9.eE+-]+?)\s*([KMGT]I?B)\s*", size.upper(), re.ASCII).groups()  # type: ignore[union-attr]
            result = int(float(number) * _UNITS[unit])
    except (AttributeError, ValueError, OverflowError):
        result = -1
    if result < 0:
        raise ConfigError(
            f"The size {size!r} cannot be used. Give a number of bytes, or a number with a unit: KB, MB, GB, TB "
            '(powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), such as "5GB".'
        )
    return result
