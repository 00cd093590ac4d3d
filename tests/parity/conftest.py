"""Each run of the script serves all tests: one start per library and number of processes."""

from __future__ import annotations

import pytest

from tests.parity.run import Runs, run_both


@pytest.fixture(scope="session", params=[1, 2], ids=["1 process", "2 processes"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_both(request.param, tmp_path_factory.mktemp("parity"))
