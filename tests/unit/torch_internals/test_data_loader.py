"""torch's loaders; ``busy_share`` has its test in tests/unit/data/test_worker_time.py."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.torch_internals import data_loader


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, place: int) -> int:
        if place == 7:
            raise ValueError("cannot be read")
        return place


def raised(loader: DataLoader[Any]) -> ValueError:
    with pytest.raises(ValueError, match="cannot be read") as caught:
        list(loader)
    return caught.value


def test_the_index_that_was_being_read() -> None:
    assert data_loader.index_being_read(raised(DataLoader(Broken(), batch_size=4)).__traceback__) == 7


def test_no_index_where_torch_was_not_reading() -> None:
    def fetch(idx: int) -> None:
        raise ValueError("cannot be read")

    with pytest.raises(ValueError, match="cannot") as caught:
        fetch(3)
    assert data_loader.index_being_read(caught.value.__traceback__) is None


def test_the_processes_of_workers() -> None:
    fork = multiprocessing.get_context("fork")
    batches = iter(DataLoader(torch.arange(4), num_workers=2, multiprocessing_context=fork))  # type: ignore[arg-type]
    processes = data_loader.worker_processes(batches)
    assert [process.is_alive() for process in processes] == [True, True]
    assert all(isinstance(process.pid, int) for process in processes)
    del batches
    assert data_loader.worker_processes(iter([1])) == []


def test_a_loader_starts_workers_of_its_own() -> None:
    fork = multiprocessing.get_context("fork")
    data: Any = torch.arange(4)
    loader = DataLoader(data, num_workers=1, persistent_workers=True, multiprocessing_context=fork)
    kept = data_loader.worker_processes(iter(loader))
    assert data_loader.worker_processes(iter(loader)) == kept
    data_loader.forget_iterator(loader)
    fresh = iter(loader)
    assert data_loader.worker_processes(fresh)[0].pid != kept[0].pid
    data_loader.forget_iterator(loader)


def test_a_structure_is_pinned_by_what_each_part_knows() -> None:
    class Part:
        pinned = False

        def pin_memory(self) -> Part:
            self.pinned = True
            return self

    found = data_loader.pin({"parts": [Part(), 3]})
    assert found["parts"][0].pinned
    assert found["parts"][1] == 3
