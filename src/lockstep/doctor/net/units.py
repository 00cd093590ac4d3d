"""Figures as people read them."""

from __future__ import annotations


def micro(seconds: float | None) -> str:
    """A latency as people read it."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def rate(value: float | None) -> str:
    """Bytes a second as people read it."""
    if value is None:
        return "-"
    if value < 1e6:
        return f"{value / 1e3:.1f} kB/s"
    return f"{value / 1e9:.2f} GB/s" if value >= 1e9 else f"{value / 1e6:.1f} MB/s"


def percent(value: float | None, of: float | None) -> str:
    """A share; a dash where one is not known."""
    if value is None or not of:
        return "-"
    share = 100 * value / of
    return f"{share:.0f}%" if share >= 1 else f"{share:.1g}%"


def amount(size: int) -> str:
    """A number of bytes as people say it."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"
