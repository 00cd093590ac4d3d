"""What tests of several ranks share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from lockstep import current
from lockstep.config.handlers import InitProcessGroupKwargs
from lockstep.process_group.group import Group
from lockstep.testing import ranks

OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether this is an older torch than the one that is tested in full: `make floor`."""


def in_soak(*values: Any) -> list[Any]:
    """Parameters of a test that only `make soak` runs, such as larger world sizes."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]


def free_port() -> int:
    """A port for a server that a test will start.

    Not one that the kernel hands out by itself: it would give it to a connection of another test meanwhile.
    """
    return ranks._free_port()


def join(debug: bool = False, seconds: float | None = None) -> Group:
    """Called on: all ranks. Join the job, on the CPU; ``seconds`` is the group's timeout."""
    init = InitProcessGroupKwargs(timeout=timedelta(seconds=seconds)) if seconds else None
    return current.require(cpu=True, debug=debug, init=init).group
