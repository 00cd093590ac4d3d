"""What functions that run on ranks share."""

from __future__ import annotations

from datetime import timedelta

from lockstep.config.handlers import InitProcessGroupKwargs
from lockstep.topology import current
from lockstep.topology.group import Group


def join(debug: bool = False, seconds: float | None = None) -> Group:
    """Called on: all ranks. Join the job, on the CPU; ``seconds`` is the group's timeout."""
    init = InitProcessGroupKwargs(timeout=timedelta(seconds=seconds)) if seconds else None
    return current.require(cpu=True, debug=debug, init=init).group
