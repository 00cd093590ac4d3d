"""A prepared loader can be copied and pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import Accelerator, DataLoaderConfiguration, current
from lockstep.errors import UsageError
from tests.datasets import Numbers, SizedStream

from .ranks import prepare

pytestmark = pytest.mark.usefixtures("alone")


def through_pickle(item: Any) -> Any:
    return pickle.loads(pickle.dumps(item))


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
DATA: list[dict[str, Any]] = [
    {"dataset": Numbers(9)},
    {"dataset": Numbers(9), "shuffle": True, "generator": torch.Generator().manual_seed(2)},
    {"dataset": SizedStream(9)},
    {"dataset": Numbers(9), "num_workers": 1, "persistent_workers": True},
]


@COPIES
@pytest.mark.parametrize("options", DATA, ids=lambda options: type(options["dataset"]).__name__ + str(len(options)))
def test_a_copy_is_a_loader_of_its_own(copied: Callable[[Any], Any], options: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(batch_size=2, **copy.deepcopy(options)))
    twin = copied(loader)
    for _ in range(2):
        assert [batch.tolist() for batch in twin] == [batch.tolist() for batch in loader]
    assert (twin.iteration, twin.total_batch_size, len(twin)) == (2, 2, 5)
    for number, batch in enumerate(loader):
        if number == 1:
            other = copied(loader)
            assert other.iteration == 2
            assert accelerator.gather_for_metrics(next(iter(other))).tolist() is not None
            assert loader.sample_ids == (batch.tolist() if "num_workers" not in options else loader.sample_ids)
    assert sorted(item for batch in other for item in batch.tolist()) == list(range(9))
    if "num_workers" in options:
        for one in (loader, twin, other):
            one.inner._iterator._shutdown_workers()


@COPIES
def test_a_copy_belongs_to_the_same_accelerator(copied: Callable[[Any], Any]) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(5), batch_size=2))
    twin = copied(loader)
    for _ in twin:
        assert accelerator.gradient_state.active_dataloader is twin
    assert accelerator.prepare(twin) is twin
    assert accelerator.prepare(accelerator.skip_first_batches(loader, 1)) is not loader
    options = copied({"train": loader})
    assert [batch.tolist() for batch in options["train"]] == [[0, 1], [2, 3], [4]]


@COPIES
def test_a_restored_place_is_copied(copied: Callable[[Any], Any]) -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(Numbers(6), batch_size=2))
    for _ in loader:
        state = loader.state_dict()
        break
    loader.load_state_dict(state)
    twin = copied(loader)
    assert [batch.tolist() for batch in twin] == [batch.tolist() for batch in loader] == [[2, 3], [4, 5]]


def test_unpickled_elsewhere_it_reads_and_refuses_what_needs_the_ranks() -> None:
    """Without a session, as in a process that is not a rank."""
    options = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    loader = Accelerator(cpu=True, dataloader_config=options).prepare(
        DataLoader(Numbers(6), batch_size=2, shuffle=True)
    )
    data, expected = pickle.dumps(loader), [batch.tolist() for batch in loader]
    two = pickle.dumps(prepare(DataLoader(Numbers(6), batch_size=2), 1, 2))
    dispatched = pickle.dumps(prepare(DataLoader(Numbers(6), batch_size=2), 1, 2, dispatch_batches=True))
    current.reset()
    assert [batch.tolist() for batch in pickle.loads(data)] == expected
    assert [batch.tolist() for batch in pickle.loads(two)] == [[2, 3], [0, 1]]
    with pytest.raises(UsageError, match="pickled in rank 1 of 2"):
        list(pickle.loads(dispatched))
