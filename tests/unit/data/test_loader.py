"""A prepared loader on one process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep import Accelerator, DataLoaderConfiguration, current
from lockstep.blackbox.box import NoBox
from lockstep.data.prepare import prepare_loader

pytestmark = pytest.mark.usefixtures("alone")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def seen(loader: Any) -> list[int]:
    return [item for batch in loader for item in (batch.tolist() if batch.ndim else [batch.item()])]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, None])
@pytest.mark.parametrize("data", [torch.arange(7), Stream()], ids=["map", "stream"])
def test_the_same_batches_as_before(data: Any, batch_size: int | None) -> None:
    raw = DataLoader(data, batch_size=batch_size, collate_fn=torch.tensor if batch_size is None else None)
    loader = Accelerator(cpu=True).prepare(raw)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in raw]


def test_an_empty_loader_gives_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.ones(0, 1)))
    assert list(loader) == []
    assert accelerator.gradient_state.active_dataloader is None


def test_the_end_is_known_at_the_last_batch_also_of_a_stream() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(Stream(), batch_size=3))
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert not loader.end_of_dataloader


def test_what_is_left() -> None:
    accelerator = Accelerator(cpu=True)
    sized = accelerator.prepare(DataLoader(torch.arange(7), batch_size=2))
    assert [sized.remaining for _ in sized] == [4, 3, 2, 1]
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    assert [stream.remaining for _ in stream] == [None] * 4


def test_shuffled_epochs_differ() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(20), shuffle=True))
    first, second = seen(loader), seen(loader)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def seedable(seed: int | None) -> Any:
    current.reset()
    options = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed)
    return Accelerator(cpu=True, dataloader_config=options).prepare(DataLoader(torch.arange(20), shuffle=True))


def test_a_seedable_order_is_a_function_of_seed_and_epoch() -> None:
    one, same, other = seedable(5), seedable(5), seedable(6)
    epochs = [seen(one), seen(one), seen(one)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    torch.rand(3)  # the state of torch's own generator does not matter
    assert seen(same) == epochs[0]
    assert seen(other) != epochs[0]
    same.set_epoch(2)
    assert seen(same) == epochs[2]


def test_an_epoch_that_was_left_early_starts_again_in_order() -> None:
    whole, broken = seedable(5), seedable(5)
    seen(whole)
    second = seen(whole)
    for _ in broken:
        break
    broken.set_epoch(1)
    assert seen(broken) == second


def test_sizes() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(7), batch_size=2))
    assert loader.total_batch_size == 2
    assert loader.total_dataset_length == 7
    assert loader.batches_before == 4


def test_workers() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(7), batch_size=2, num_workers=2))
    assert seen(loader) == list(range(7))


def test_batches_are_on_the_device_one_ahead() -> None:
    """The meta device stands in for an accelerator: what arrives there has been moved."""
    started: list[int] = []

    def collate(items: list[int]) -> torch.Tensor:
        started.append(items[0])
        return torch.tensor(items)

    group = SimpleNamespace(rank=0, world_size=1, scopes=0, clock=None, box=NoBox())
    plain = DataLoader(range(6), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    loader = prepare_loader(plain, group, DataLoaderConfiguration(), device=torch.device("meta"))  # type: ignore[arg-type]
    seen = []
    for batch in loader:
        assert batch.device.type == "meta"
        seen.append((loader.sample_ids, list(started)))
    assert seen == [([0, 1], [0, 2]), ([2, 3], [0, 2, 4]), ([4, 5], [0, 2, 4])]


def test_the_black_box_knows_when_data_is_fetched() -> None:
    class Noting(NoBox):
        __slots__ = ("seen",)

        def phase(self, name: str, site: bool = False) -> None:
            self.seen.append(name)

    box = Noting()
    box.seen = []
    group: Any = SimpleNamespace(rank=0, world_size=1, scopes=0, clock=None, box=box)
    loader = prepare_loader(DataLoader(range(4), batch_size=2), group, DataLoaderConfiguration())  # type: ignore[arg-type]
    for _ in loader:
        box.seen.append("script")
    assert box.seen == ["data", "", "script", "data", "", "script", "data", ""]
    box.seen.clear()
    for _ in loader:
        break
    assert box.seen == ["data", "", ""]
