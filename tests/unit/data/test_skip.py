"""skip_first_batches of a loader that is not prepared, or not yet."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lockstep import skip_first_batches
from tests.datasets import Numbers, SizedStream

from .ranks import KINDS, gathered, make, prepare, values


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "seeded"])
@pytest.mark.parametrize("skipped", [0, 2, 9])
def test_the_first_batches_are_left_out_each_time(kind: str, skipped: int) -> None:
    plain, short = make(kind, 11, 2), skip_first_batches(make(kind, 11, 2), skipped)
    for _ in range(2):
        assert [values(batch) for batch in short] == [values(batch) for batch in plain][skipped:]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "single"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_it_can_be_prepared_afterwards(kind: str, world_size: int) -> None:
    seeded = kind == "seeded"
    whole = gathered([prepare(make(kind, 11, 2), 0, 1, seeded=seeded)])
    first = sum(len(values(batch)) for batch in list(make(kind, 11, 2))[:2])
    loaders = [
        prepare(skip_first_batches(skip_first_batches(make(kind, 11, 2), 1), 1), rank, world_size, seeded=seeded)
        for rank in range(world_size)
    ]
    assert gathered(loaders) == whole[first:]
    state = loaders[0].state_dict()
    assert state["epoch"] == 1


def test_a_prepared_one_resumes() -> None:
    def made() -> Any:
        return prepare(skip_first_batches(make("shuffled", 20, 2), 3), 0, 1)

    loader, rest = made(), []
    for number, batch in enumerate(loader):
        if number == 1:
            state = loader.state_dict()
        elif number > 1:
            rest += values(batch)
    again = made()
    again.load_state_dict(state)
    assert gathered([again]) == rest


def test_lengths_workers_and_copies() -> None:
    assert len(skip_first_batches(make("plain", 11, 2), 2)) == 4
    assert len(skip_first_batches(DataLoader(SizedStream(11), batch_size=2), 2)) == 4
    stream: DataLoader[Any] = DataLoader(SizedStream(7), batch_size=2, num_workers=2)
    short = skip_first_batches(stream, 3)
    # The first batch is always the first worker's.
    assert sorted(values(batch) for batch in short) == sorted(values(batch) for batch in list(stream)[3:])
    short = skip_first_batches(DataLoader(Numbers(6), batch_size=2), 1)
    for copied in (copy.deepcopy(short), pickle.loads(pickle.dumps(short))):
        assert [values(batch) for batch in copied] == [[2, 3], [4, 5]]
