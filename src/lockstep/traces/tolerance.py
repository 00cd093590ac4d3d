"""How far two numbers may lie apart before they count as different, from the dtypes that they went through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.traces.frames import Frame, Stat

BY_DTYPE = {
    "float64": 1e-10,
    "complex128": 1e-10,
    "float32": 1e-5,
    "complex64": 1e-5,
    "float16": 1e-2,
    "complex32": 1e-2,
    "bfloat16": 6e-2,
    "float8_e4m3fn": 0.3,
    "float8_e4m3fnuz": 0.3,
    "float8_e5m2": 0.5,
    "float8_e5m2fnuz": 0.5,
    "float8_e8m0fnu": 0.5,
}
"""Dtype -> tolerated difference, as a share of the tensor's largest value; about ten roundings. Others are exact."""

GRADIENTS = 3.0
"""So much more is tolerated of gradients, which sum up the roundings of all samples, and of what was moved by them. Six
encoder layers in bf16 against fp32, 20 steps: up to 1.2 % apart in the forward pass, 12 % in the backward pass."""

ABSOLUTE = 1e-8
"""Below this two numbers are the same whatever their ratio: where zero is meant, rounding leaves such remains."""

COARSE = 1e-3
"""From this tolerance on the smallest value is not compared: what is zero in one run is a rounding in the other."""

SHARE = 0.01
"""Tolerated difference of the share of values that underflowed."""

_PASSING = ("input", "output", "grad_input", "grad_output")


def is_parameter(frame: Frame, stat: Stat) -> bool:
    """Whether a tensor lives longer than the call: a weight, not what passes through."""
    return frame.phase == "forward" and stat.name.partition("[")[0].partition(".")[0] not in _PASSING


@dataclass
class Tolerance:
    """The tolerance at one place of two runs that are read in parallel.

    A rounding travels on: behind a layer in bf16 a tensor in fp32 is no more exact than bf16 was. So what counts is the
    coarsest dtype on the way to a tensor, in either run. Parameters carry what happened in the batches before.
    """

    fixed: float | None = None
    """The user's own, for every dtype."""
    absolute: float = ABSOLUTE
    _way: float = field(default=0.0, init=False)
    _before: float = field(default=0.0, init=False)

    def begin(self, batch: int, frames: Iterable[Frame]) -> None:
        """A new batch; ``frames`` are those of both runs in it."""
        # The batches before the first recorded one are not to be seen; they were as this one is.
        unseen = batch > 0 and self._before == self._way == 0.0
        coarsest = max((_of(stat) for frame in frames for stat in frame.stats), default=0.0) if unseen else self._way
        self._before = coarsest

    def between(self, frame: Frame, first: Stat, second: Stat) -> float:
        """The tolerance for one tensor of the two runs."""
        own = max(_of(first), _of(second))
        self._way = max(self._way, own)
        if self.fixed is not None:
            return self.fixed
        if own == 0.0:
            return 0.0
        if is_parameter(frame, first):
            return max(own, GRADIENTS * self._before)
        return max(own, self._way) * (1.0 if frame.phase == "forward" else GRADIENTS)


def _of(stat: Stat) -> float:
    return 0.0 if stat.note else BY_DTYPE.get(stat.dtype.removeprefix("torch."), 0.0)
