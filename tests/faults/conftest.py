"""Jobs that run side by side; and tests of faults that stay in this process begin where those of one process do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.jobs import Job, Result, side_by_side
from tests.unit.conftest import alone

__all__ = ["alone", "ended"]


@pytest.fixture(scope="session")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Job], Result]]:
    """Gives the result of a test's ``job``; those of all tests that will run are started with the first one."""
    items = [item for item in request.session.items if "ended" in getattr(item, "fixturenames", ())]
    jobs = [item.callspec.params["job"] for item in items if isinstance(item, pytest.Function)]
    with side_by_side(jobs, lambda: tmp_path_factory.mktemp("job")) as result:
        yield result
