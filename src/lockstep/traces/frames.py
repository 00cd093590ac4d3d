"""What one call of one module looked like in numbers: the form that the detector fills and that traces keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Stat:
    """The numbers of one tensor, or the note that stands in for them."""

    name: str
    """Its place in the call: "weight", "input[0]", "output", "grad_output[0]"."""
    dtype: str
    shape: tuple[int, ...]
    abs_min: float
    abs_max: float
    nans: bool
    infs: bool
    tiny: float | None
    """Share of the values that became zero or subnormal in the dtype; None when nobody counted."""
    note: str = ""
    """Said instead of numbers: "None", "not a tensor"."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of one module, or one parameter's optimizer step."""

    batch: int
    phase: str
    """ "forward", "backward" or "optimizer"."""
    module: str
    """Fully qualified; the root is ""."""
    kind: str
    """The class's name."""
    call: int
    """How many times this module was called before in this batch."""
    stats: tuple[Stat, ...]


class FrameSink(Protocol):
    """Takes frames as they happen: a trace file, the frames last seen, a test's list."""

    def add(self, frame: Frame) -> None:
        """Take one frame."""
        ...

    def close(self) -> None:
        """Keep what was taken; nothing is added after this."""
        ...
