"""Jobs that several tests look at run once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.fuzz.jobs import Job, Result, run


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], Result]:
    """Runs a job, or gives what it ended with when it was run before."""
    return cache(lambda job: run(tmp_path_factory.mktemp("fuzz"), job))
