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
    if isinstance(size, int):
        number, text = float(size), str(size)
        result = size
    else:
        match = re.fullmatch(r"\s*([0-9.eE+-]+?)\s*([KMGT]i?B)\s*", str(size), re.IGNORECASE)
        text = repr(size)
        try:
            number = float(match[1]) if match else -1.0
            result = int(number * _UNITS[match[2].upper()]) if match else -1
        except (ValueError, OverflowError):
            number, result = -1.0, -1
        if match and match[2].endswith("b") and "I" not in match[2].upper():
            result //= 8
    if number < 0 or result < 0:
        raise ConfigError(
            f"The size {text} cannot be used. Give a number of bytes, or a number with a unit: KB, MB, GB, TB (powers "
            'of 1000) or KiB, MiB, GiB, TiB (powers of 1024), such as "5GB".'
        )
    return result
