"""For tests of one process: nothing around it looks like a job, and no job is left over."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lockstep.topology import current

_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that nobody launched and that nobody configured, before and after."""
    for name in os.environ:
        if name in _JOB or name.startswith(("ACCELERATE_", "LOCKSTEP_", "SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    current.reset()
    yield
    current.reset()
