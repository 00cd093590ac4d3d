"""What torch's process groups have that has no public name."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from lockstep.torch_internals import c10d


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_backend_gathers_into_one_tensor(group: Any) -> None:
    source, result = torch.arange(3.0), torch.zeros(3)
    backend = c10d.backend_for(group, torch.device("cpu"))
    c10d.all_gather_into(backend, result, source, AllgatherOptions()).wait()
    assert torch.equal(result, source)


def test_the_store_of_a_group_that_a_script_made(group: Any) -> None:
    c10d.default_store().set("internals", "here")
    assert c10d.default_store().get("internals") == b"here"


def test_a_wait_of_the_scripts_own_goes_another_way_and_comes_back(group: Any) -> None:
    waited: list[tuple[bool, str]] = []

    def wait(work: Any, doing: str) -> None:
        work.wait(timedelta(seconds=10))  # with a timeout, as ours do: torch's own
        waited.append((work.is_completed(), doing))

    before = dist.Work.wait
    with c10d.waiting_by(wait):
        dist.all_reduce(torch.ones(1))
        dist.barrier()
    assert waited == [(True, "calling torch.distributed")] * 2
    dist.all_reduce(torch.ones(1))
    assert dist.Work.wait is before
    assert len(waited) == 2
