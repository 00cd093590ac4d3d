"""Prepared loaders on several ranks: who sees what, and metrics without repeated samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep import Accelerator, ConfigError, DataLoaderConfiguration
from lockstep.testing import run_ranks
from tests.datasets import Numbers, SizedStream, Stream
from tests.ranks import in_soak


class Blocks(Dataset[Tensor]):
    """Whole batches of four, as a data set that batches by itself."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> Tensor:
        return torch.arange(4 * place, 4 * place + 4)


class Buckets:
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10])

    def __len__(self) -> int:
        return 5


def make(kind: str, count: int, batch_size: int | None, **options: Any) -> DataLoader[Tensor]:
    if kind == "blocks":
        return DataLoader(Blocks(), batch_size=None)
    if kind == "buckets":
        return DataLoader(Numbers(11), batch_sampler=Buckets())  # type: ignore[arg-type]
    data = {"map": Numbers, "stream": Stream, "sized": SizedStream}[kind](count)
    return DataLoader(data, batch_size=batch_size, **options)


def walk(cases: list[tuple[str, int, int | None, dict[str, Any]]], arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """For each loader: the batches of two epochs, its length, and what gather_for_metrics gives."""
    torch.manual_seed(torch.initial_seed() % 1000 + 17 * int(Accelerator().process_index))
    accelerator = Accelerator(**arguments)
    found = []
    for kind, count, batch_size, options in cases:
        loader = accelerator.prepare(make(kind, count, batch_size, **options))
        try:
            length: int | None = len(loader)
        except TypeError:
            length = None
        epochs: list[list[list[int]]] = []
        metrics: list[int] = []
        for number in range(2):
            epochs.append([])
            for batch in loader:
                epochs[-1].append(batch.reshape(-1).tolist())
                if number == 0 and accelerator.even_batches and kind != "buckets":
                    metrics += accelerator.gather_for_metrics(batch).reshape(-1).tolist()
        found.append({"epochs": epochs, "length": length, "metrics": metrics})
    return found


def together(ranks: list[dict[str, Any]], number: int = 0) -> list[int]:
    return [item for rank in ranks for batch in rank["epochs"][number] for item in batch]


COUNTS = [(10, 2), (11, 2), (12, 3), (7, 4), (1, 2), (3, 1), (24, 4)]


@pytest.mark.parametrize("world_size", [3, *in_soak(2)])
def test_every_sample_is_seen_and_metrics_are_exact(world_size: int) -> None:
    cases: list[Any] = [(kind, n, size, {}) for kind in ("map", "stream", "sized") for n, size in COUNTS]
    cases += [
        ("map", 7, None, {}),
        ("stream", 7, None, {}),
        ("blocks", 12, None, {}),
        ("map", 7, 2, {"num_workers": 2}),
    ]
    results = run_ranks(walk, world_size, cases, {})
    for case, *ranks in zip(cases, *results, strict=True):
        count = case[1]
        assert set(together(ranks)) == set(range(count)), case
        assert len({len(rank["epochs"][0]) for rank in ranks}) == 1, case
        for rank in ranks:
            assert rank["metrics"] == list(range(count)), case
            if case[0] != "stream":
                assert rank["length"] == len(rank["epochs"][0]), case


def test_shuffled_orders_fit_together_and_change() -> None:
    cases: list[Any] = [("map", 24, 3, {"shuffle": True}), ("map", 23, 4, {"shuffle": True})]
    for arguments in ({}, {"rng_types": ["torch"]}, {"rng_types": ["generator", "torch"]}):
        for case, *ranks in zip(cases, *run_ranks(walk, 2, cases, arguments), strict=True):
            for number in (0, 1):
                assert set(together(ranks, number)) == set(range(case[1])), (case, arguments)
            assert together(ranks, 0) != together(ranks, 1), arguments
            assert sorted(ranks[0]["metrics"]) == list(range(case[1])), arguments


def test_a_seedable_order_fits_together_whatever_the_ranks_seeds_are() -> None:
    case: Any = [("map", 24, 3, {"shuffle": True})]
    for seed in (None, 4):
        options = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
        ranks = [result[0] for result in run_ranks(walk, 2, case, {"dataloader_config": options})]
        for number in (0, 1):
            assert sorted(together(ranks, number)) == list(range(24))
        assert together(ranks, 0) != together(ranks, 1)
        if seed is not None:
            again = [result[0] for result in run_ranks(walk, 2, case, {"dataloader_config": options})]
            assert again == ranks


def test_drop_last() -> None:
    cases: list[Any] = [(kind, 11, 2, {"drop_last": True}) for kind in ("map", "sized")]
    for _, *ranks in zip(cases, *run_ranks(walk, 2, cases, {}), strict=True):
        assert sorted(together(ranks)) == list(range(8))
        assert [rank["length"] for rank in ranks] == [2, 2]
        assert ranks[0]["metrics"] == list(range(8))


def test_split_batches() -> None:
    cases: list[Any] = [(kind, count, 4, {}) for kind in ("map", "stream", "sized") for count in (8, 10, 3)]
    for case, *ranks in zip(cases, *run_ranks(walk, 2, cases, {"split_batches": True}), strict=True):
        assert set(together(ranks)) == set(range(case[1])), case
        assert all(len(batch) == 2 for rank in ranks for batch in rank["epochs"][0]), case
        for rank in ranks:
            assert rank["metrics"] == list(range(case[1])), case
            if case[0] != "stream":
                assert rank["length"] == len(rank["epochs"][0]), case


def test_uneven_batches_repeat_nothing() -> None:
    options = {"dataloader_config": DataLoaderConfiguration(even_batches=False)}
    cases: list[Any] = [(kind, count, 2, {}) for kind in ("map", "sized") for count in (8, 9, 11)]
    for case, *ranks in zip(cases, *run_ranks(walk, 2, cases, options), strict=True):
        assert sorted(together(ranks)) == list(range(case[1])), case
        assert [rank["length"] for rank in ranks] == [len(rank["epochs"][0]) for rank in ranks], case


def test_batches_of_any_size_stay_whole() -> None:
    ranks = [result[0] for result in run_ranks(walk, 2, [("buckets", 11, None, {})], {})]
    assert ranks[0]["epochs"][0] == [[0, 1, 2], [4, 5], [10]]
    assert ranks[1]["epochs"][0] == [[3], [6, 7, 8, 9], [0, 1, 2]]
    assert [rank["length"] for rank in ranks] == [3, 3]


def refused(batch_size: int | None) -> str:
    try:
        Accelerator(split_batches=True).prepare(DataLoader(Numbers(8), batch_size=batch_size))
    except ConfigError as error:
        return str(error)
    return ""


def test_batches_that_cannot_be_split() -> None:
    assert all("a batch of 3 cannot be cut into 2" in text for text in run_ranks(refused, 2, 3))
    assert all("fixed batch_size" in text for text in run_ranks(refused, 2, None))


def structures() -> tuple[list[str], list[int], list[int]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(5), batch_size=2))
    names: list[str] = []
    nested: list[int] = []
    whole: list[int] = []
    for batch in loader:
        names += accelerator.gather_for_metrics([f"sample {place}" for place in batch.tolist()])
        nested += accelerator.gather_for_metrics([{"ids": batch}])[0]["ids"].tolist()
        whole += [int(one) for one in accelerator.gather_for_metrics(list(batch), use_gather_object=True)]
    return names, nested, whole


def test_metrics_of_objects_and_structures() -> None:
    for names, nested, whole in run_ranks(structures, 2):
        assert names == [f"sample {place}" for place in range(5)]
        assert nested == whole == list(range(5))
