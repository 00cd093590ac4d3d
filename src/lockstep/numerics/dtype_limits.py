"""What each dtype can hold, and what to do about a number that it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

NEAR = 0.1
"""A value above this part of the largest one is close to the edge: a few additions or one scaling lead over it."""
SCALER_PATIENCE = 20
"""In fp16 so many updates in a row may overflow: the loss scaler looks for its scale by trying."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a floating dtype can hold."""

    name: str
    """As people call it."""
    largest: float
    """The largest finite number."""
    smallest_normal: float
    """Below this, precision is lost bit by bit."""
    smallest: float
    """Below half of this, a number becomes zero."""
    has_inf: bool
    """Whether what is too large becomes infinite; else it becomes NaN, or the largest number."""

    @property
    def narrow(self) -> bool:
        """Whether values of ordinary models leave this range."""
        return self.largest < 1e30


_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_WITHOUT_INF = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")


@cache
def range_of(dtype: torch.dtype) -> Range | None:
    """The range of a floating dtype; of a complex one, that of its parts; None for others."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    if not dtype.is_floating_point:
        return None
    try:
        info = torch.finfo(dtype)
        largest, normal, step = float(info.max), float(info.smallest_normal), float(info.eps)
    except (TypeError, RuntimeError):  # dtypes that pack several numbers into a byte have none
        return None
    plain = str(dtype).removeprefix("torch.")
    name = _NAMES.get(dtype) or plain.replace("float8_", "fp8 ")
    return Range(
        name=name,
        largest=largest,
        smallest_normal=normal,
        smallest=normal * step,
        has_inf=plain not in _WITHOUT_INF,
    )


def range_named(dtype: str) -> Range | None:
    """The same, for a dtype's text as frames keep it: "float16"."""
    found = getattr(torch, dtype, None)
    return range_of(found) if isinstance(found, torch.dtype) else None


def near_edge(abs_max: float, dtype: str) -> str | None:
    """How close to the edge a value is, in words, where that is close: "abs max 6.27e+04 of fp16's 6.55e+04"."""
    limits = range_named(dtype)
    if limits is None or not limits.largest * NEAR <= abs_max <= limits.largest:
        return None
    return f"abs max {abs_max:.2e} of {limits.name}'s {limits.largest:.2e}"
