"""Dealing items to ranks, as pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from lockstep.data.shards import Dealer, DealtBatchSampler, ShardedBatchSampler, ShardedIterable, check_split
from lockstep.errors import ConfigError


def dealers(world_size: int, share: int, drop_last: bool, even: bool) -> list[Dealer]:
    return [
        Dealer(rank=rank, world_size=world_size, share=share, drop_last=drop_last, even=even)
        for rank in range(world_size)
    ]


setups = st.tuples(st.integers(0, 30), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.booleans())


@given(setups)
def test_what_is_dealt(setup: tuple[int, int, int, bool, bool]) -> None:
    count, world_size, share, drop_last, even = setup
    players = dealers(world_size, share, drop_last, even)
    hands = [list(player.deal(range(count))) for player in players]
    assert [len(hand) for hand in hands] == [player.rounds(count) for player in players]
    size = share * world_size
    real = count - count % size if drop_last else count
    everything = [item for hand in hands for part in hand for item in part]
    assert set(everything) == set(range(real))
    if even or drop_last:
        assert len({len(hand) for hand in hands}) == 1
        assert all(len(part) == share for hand in hands for part in hand)
        assert len(everything) == -(-real // size) * size
    else:
        assert len(everything) == real
    expected = 0 if drop_last else count % size
    assert {player.remainder for player in players} == {expected}


@given(setups)
def test_the_real_items_of_a_round_come_first(setup: tuple[int, int, int, bool, bool]) -> None:
    """Gathering a round over the ranks gives the global order, and what was repeated at its end."""
    count, world_size, share, drop_last, _ = setup
    players = dealers(world_size, share, drop_last, True)
    rounds = zip(*(player.deal(range(count)) for player in players), strict=True)
    order = [item for hands in rounds for hand in hands for item in hand]
    real = len(order) - (share * world_size - players[0].remainder if players[0].remainder else 0)
    assert order[:real] == list(range(real))


@given(
    count=st.integers(0, 30),
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 3),
    drop_last=st.booleans(),
    even=st.booleans(),
)
def test_a_batch_sampler_has_the_length_it_says(
    count: int, batch_size: int, world_size: int, drop_last: bool, even: bool
) -> None:
    inner = BatchSampler(SequentialSampler(range(count)), batch_size, drop_last)
    samplers = [
        ShardedBatchSampler(inner, rank=rank, world_size=world_size, split=False, even=even)
        for rank in range(world_size)
    ]
    batches = [list(sampler) for sampler in samplers]
    assert [len(part) for part in batches] == [len(sampler) for sampler in samplers]
    seen = {index for part in batches for batch in part for index in batch}
    whole = batch_size * world_size
    assert seen == set(range(count - count % whole if drop_last else count))


class Buckets:
    """Batches of changing size, with no size of its own to tell."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(self.sizes)


@given(sizes=st.lists(st.integers(1, 5), max_size=9), world_size=st.integers(1, 4), even=st.booleans())
def test_batches_of_any_size_are_dealt_whole(sizes: list[int], world_size: int, even: bool) -> None:
    inner = Buckets(sizes)
    samplers = [DealtBatchSampler(inner, rank=rank, world_size=world_size, even=even) for rank in range(world_size)]
    hands = [list(sampler) for sampler in samplers]
    assert [len(hand) for hand in hands] == [len(sampler) for sampler in samplers]
    whole = [tuple(batch) for batch in inner]
    dealt = [tuple(batch) for hand in hands for batch in hand]
    assert set(dealt) == set(whole)
    assert len(dealt) == (-(-len(whole) // world_size) * world_size if even else len(whole))
    rest = len(sizes) % world_size
    assert {sampler.remainder for sampler in samplers} == {sum(sizes[-rest:]) if rest else 0}


class Count:
    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = -1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@given(count=st.integers(0, 30), batch_size=st.integers(1, 5), world_size=st.integers(1, 3))
def test_a_stream(count: int, batch_size: int, world_size: int) -> None:
    parts = [
        ShardedIterable(
            Count(count),
            batch_size=batch_size,
            drop_last=False,
            rank=rank,
            world_size=world_size,
            split=False,
            even=True,
        )
        for rank in range(world_size)
    ]
    hands = [list(part) for part in parts]
    assert [len(hand) for hand in hands] == [len(part) for part in parts]
    assert {item for hand in hands for item in hand} == set(range(count))


def test_a_stream_passes_on_what_it_does_not_know() -> None:
    inner = Count(4)
    part = ShardedIterable(inner, batch_size=2, drop_last=False, rank=0, world_size=2, split=False, even=True)
    part.set_epoch(3)
    assert inner.epoch == 3
    assert part.count == 4
    with pytest.raises(AttributeError):
        _ = part.no_such_thing


def test_splitting_needs_a_size_that_divides() -> None:
    assert check_split(8, 4) == 2
    with pytest.raises(ConfigError, match=r"batch of 7 cannot be cut into 2.*multiple of 2"):
        check_split(7, 2)
    with pytest.raises(ConfigError, match="fixed batch_size"):
        check_split(None, 2)
