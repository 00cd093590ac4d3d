"""For every test: child processes can import what the parent can, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leaks import Snapshot

pytest_plugins = ["tests.durations"]

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what it puts into the background with SIGINT ignored, and children inherit that: tests that send
    # one would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    # A child process is started with this environment: it finds `lockstep` in this tree and test functions by the
    # name (tests.unit.test_x) that pytest gives their module.
    before = os.environ.get("PYTHONPATH")
    paths = [str(ROOT / "src"), str(ROOT), *(before.split(os.pathsep) if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))

    # Torch asks for the name behind each connection; where the name server is slow to answer, that takes 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

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


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that nobody launched and that nobody configured, before and after."""
    from lockstep import current

    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in os.environ:
        if name in job or name.startswith(("ACCELERATE_", "LOCKSTEP_", "SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    current.reset()
    yield
    current.reset()


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say which tests stay together when several processes share them, and in which order these take them.

    Together are those that share a run of a script or a fixture of their module. Those that mostly wait are mixed with
    those that mostly compute, so that the cores are busy; and the short ones come last, so that all are to the end.
    """
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    if getattr(config.option, "loadgroup", False):
        items.sort(key=lambda item: ("unit" in item.path.parts, zlib.crc32((groups[item] or item.nodeid).encode())))


def _group(item: pytest.Item) -> str | None:
    assert isinstance(item, pytest.Function)
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "job" in parameters:
        return f"job-{zlib.crc32(repr(parameters['job']).encode()):x}"
    if "runs" in parameters:
        return f"runs-{parameters['runs']}"
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return item.path.stem if any(found[-1].scope == "module" for found in fixtures) else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail where groups get lost: what tests share would be made again by every worker, and nobody would know."""
    # The tests themselves and all modules live to the end: no collection needs to go through them.
    gc.collect()
    gc.freeze()
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if getattr(session.config.option, "loadgroup", False) and any("@" not in item.nodeid for item in grouped):
        raise pytest.UsageError("pytest-xdist does not see the groups of tests: use the versions of constraints.txt.")


@pytest.fixture(autouse=True, scope="session")
def libuv_has_started() -> None:
    """Torch's first store opens descriptors that stay for the life of the process: before a test is blamed for them."""
    if "torch.distributed" in sys.modules:
        sys.modules["torch.distributed"].TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same weights and data in every run: what fails once fails again."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads, descriptors, environment variables, a process group or files behind.

    Being automatic it is set up before and torn down after the other fixtures of the test, so what they clean up
    counts as clean. What fixtures of wider scope hold exists before the look, so it is theirs to keep.
    """
    before = Snapshot.take(ROOT)
    yield
    request.node.funcargs.clear()  # what the test was given: pytest would hold it until later
    if left := before.left_behind():
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)
