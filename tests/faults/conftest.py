"""Jobs that tests of faults look at."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.faults.jobs import Job, Result, run


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], Result]:
    """Gives the result of a job, which tests that look at the same one share."""
    return cache(lambda job: run(tmp_path_factory.mktemp("job"), job))
