"""Metrics are exactly the data set once, in the order of an unprepared loader: all small cases, on real ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep import Accelerator, DataLoaderConfiguration
from lockstep.testing import run_ranks
from tests.datasets import Numbers, SizedStream, Stream
from tests.ranks import in_soak

DATA: dict[str, Any] = {"map": Numbers, "stream": Stream, "sized": SizedStream}
Case = tuple[str, int, int]


def exact(options: dict[str, Any]) -> tuple[int, list[Any]]:
    """How many cases were tried, and those whose metrics were wrong."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    wrong, tried = [], 0
    for kind, count, batch_size in itertools.product(DATA, range(1, 18), range(1, 5)):
        plain = DataLoader(DATA[kind](count), batch_size=batch_size)
        if options.get("split_batches") and batch_size % accelerator.num_processes:
            try:
                accelerator.prepare(plain)
            except ValueError:
                continue
            wrong.append((kind, count, batch_size, "was not refused"))
            continue
        loader = accelerator.prepare(plain)
        found: list[int] = []
        for batch in loader:
            found += accelerator.gather_for_metrics(batch).tolist()
        tried += 1
        if found != list(range(count)):
            wrong.append((kind, count, batch_size, found))
        accelerator.free_memory()
    return tried, wrong


@pytest.mark.parametrize("world_size", [2, *in_soak(3, 4)])
@pytest.mark.parametrize("dispatch", [False, True], ids=["each reads", "dispatched"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_metrics_are_exact(world_size: int, dispatch: bool, split: bool) -> None:
    sizes = [size for size in range(1, 5) if not split or size % world_size == 0]
    for tried, wrong in run_ranks(exact, world_size, {"dispatch_batches": dispatch, "split_batches": split}):
        assert wrong == []
        assert tried == 3 * 17 * len(sizes)


def test_metrics_are_exact_on_one_process() -> None:
    assert run_ranks(exact, 1, {}) == [(3 * 17 * 4, [])]


def means(options: dict[str, Any]) -> list[Any]:
    """The cases in which a mean, repeated as for a full batch, or padded rows do not give one value per sample."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    wrong = []
    for kind, count, batch_size in itertools.product(DATA, (1, 3, 6, 10, 13), (1, 4)):
        loader = accelerator.prepare(DataLoader(DATA[kind](count), batch_size=batch_size))
        due = found = several = 0
        for batch in loader:
            assert loader.current is not None
            due += sum(loader.current.real)
            found += len(accelerator.gather_for_metrics(batch.float().mean().repeat(batch_size)))
            several += len(accelerator.gather_for_metrics(["x"] * 2 * len(batch)))
        if due != found or (several != 2 * due and count >= batch_size * accelerator.num_processes):
            wrong.append((kind, count, batch_size, due, found, several))
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, *in_soak(3, 4)])
@pytest.mark.parametrize("even", [True, False])
def test_a_mean_for_each_sample_of_a_full_batch_counts_real_samples(world_size: int, even: bool) -> None:
    for dispatch in (False, True):
        options = {"even_batches": even, "dispatch_batches": dispatch}
        assert run_ranks(means, world_size, options) == [[]] * world_size


@dataclass
class Batch:
    numbers: Tensor
    names: list[str]


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, place: int) -> Any:
        return place, f"sample {place}"


def collate(items: list[Any]) -> Batch:
    return Batch(torch.tensor([item[0] for item in items]), [item[1] for item in items])


def structures(options: dict[str, Any]) -> dict[str, Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(Named(), batch_size=2, collate_fn=collate))
    found: dict[str, Any] = {"tensor": [], "nested": [], "objects": [], "dict": {"names": [], "twice": []}, "types": []}
    for batch in loader:
        found["types"].append(type(batch).__name__)
        numbers = batch.numbers
        found["tensor"] += accelerator.gather_for_metrics(numbers).tolist()
        nested = accelerator.gather_for_metrics({"a": numbers, "b": (numbers * 2, [numbers.float().unsqueeze(1)])})
        found["nested"] += list(
            zip(nested["a"].tolist(), nested["b"][0].tolist(), nested["b"][1][0].flatten().tolist(), strict=True)
        )
        found["objects"] += accelerator.gather_for_metrics(batch.names)
        answer = accelerator.gather_for_metrics({"names": batch.names, "twice": [name * 2 for name in batch.names]})
        for key, value in answer.items():
            found["dict"][key] += value
    return found


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}, {"even_batches": False}], ids=str)
def test_structures_are_exact(options: dict[str, Any]) -> None:
    world_size = 2
    names = [f"sample {place}" for place in range(7)]
    for rank, found in enumerate(run_ranks(structures, world_size, options)):
        assert set(found["types"]) == {"Batch"}
        if options.get("even_batches") is False and rank == 1:
            # The last round was rank 0's alone: ranks 1 had no batch in it, and did not wait.
            continue
        assert found["tensor"] == list(range(7))
        assert found["nested"] == [(place, 2 * place, float(place)) for place in range(7)]
        assert found["objects"] == names
        assert found["dict"] == {"names": names, "twice": [name * 2 for name in names]}
