"""For every test: child processes can import what the parent can, and nothing is left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leaks import Snapshot

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    # A child process is started with this environment: it finds `lockstep` in this tree and test functions by the
    # name (tests.unit.test_x) that pytest gives their module.
    before = os.environ.get("PYTHONPATH")
    paths = [str(ROOT / "src"), str(ROOT), *(before.split(os.pathsep) if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))

    # Jobs that a test starts keep their files here, unless it says otherwise, and not in this tree.
    runs = tempfile.TemporaryDirectory(prefix="lockstep-tests-")
    os.environ["LOCKSTEP_RUN_DIR"] = runs.name

    def restore() -> None:
        os.environ.pop("LOCKSTEP_RUN_DIR", None)
        runs.cleanup()
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before

    config.add_cleanup(restore)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests stay together when several processes share them: those that share pools, jobs or machines."""
    for item in items:
        folder = item.path.parent.name
        together = {"clusters": "clusters", "parity": "parity"}.get(folder, str(item.path))
        if folder == "faults" and "ended" in getattr(item, "fixturenames", ()):
            together = "jobs"
        item.add_marker(pytest.mark.xdist_group(together))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves threads, environment variables, a process group or files behind.

    Being automatic it is set up before and torn down after the other fixtures of the test, so what they clean up
    counts as clean. What fixtures of wider scope hold exists before the look, so it is theirs to keep.
    """
    before = Snapshot.take(ROOT)
    yield
    if left := before.left_behind():
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)
