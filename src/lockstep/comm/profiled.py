"""Short forms of torch's functions, which leave out what only a profiler needs.

Torch names each forward, batch and update to a profiler, whether one runs or not. That takes 20 to 30 us each time,
much of it because nothing else needs that code, so that it has to come from memory. Where no profiler runs, and torch's
function is still the one that the short form was written after, the short form is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

being_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler of torch's runs."""


def is_as_known(function: Any, *names: str) -> bool:
    """Whether a function uses just these names, in this order."""
    return bool(function.__code__.co_names == ("torch", "autograd", "profiler", "record_function", *names))
