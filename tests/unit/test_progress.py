"""One bar per machine."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch

from lockstep import current
from lockstep.errors import ConfigError
from lockstep.process_group.group import Group
from lockstep.progress import tqdm
from lockstep.topology.topology import Topology

pytestmark = pytest.mark.usefixtures("alone")  # another test may have left a session


def be(monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int) -> None:
    """Rank ``rank`` of 4 on two machines, before it has joined the job."""
    place = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29500}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def shown(**kwargs: object) -> str:
    out = io.StringIO()
    assert list(tqdm(range(3), file=out, **kwargs)) == [0, 1, 2]
    return out.getvalue()


def test_alone_there_is_a_bar() -> None:
    assert "3/3" in shown()


@pytest.mark.parametrize(("rank", "local_rank", "bar"), [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False)])
def test_the_first_process_of_each_machine_shows_it(
    monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, bar: bool
) -> None:
    be(monkeypatch, rank, local_rank)
    assert bool(shown()) is bar
    assert "3/3" in shown(main_process_only=False)


def test_the_job_joined_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(rank=1, world_size=2, local_rank=1, local_world_size=2, device=torch.device("cpu"))
    monkeypatch.setattr(current, "peek", lambda: current.Session(topology=topology, group=Group(topology)))
    assert shown() == ""


def test_what_the_caller_disables_stays_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(disable=True) == ""
    assert shown(disable=True, main_process_only=False) == ""
    assert shown(disable=None) == ""  # tqdm's own rule: no terminal, no bar
    assert "3/3" in shown(disable=False)
    be(monkeypatch, 1, 1)
    assert shown(disable=False) == ""


@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_in_place_of_the_iterable_is_refused(flag: bool) -> None:
    with pytest.raises(ConfigError, match=f"main_process_only={flag} by name"):
        tqdm(flag, range(3))


def test_it_can_be_imported_without_importing_tqdm() -> None:
    code = (
        "import sys, torch; sys.modules.pop('tqdm', None); import lockstep.progress; assert 'tqdm' not in sys.modules"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr
