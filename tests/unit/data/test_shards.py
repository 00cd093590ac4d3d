"""Dealing samples to ranks: every one once, in order, and each rank knows what the others hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lockstep.data.shards import check_split
from lockstep.errors import ConfigError, DataError
from tests.datasets import Numbers, Stream

from .ranks import KINDS, Bags, OddBatches, gathered, make, prepare, ranks_of, real, values

counts = st.integers(0, 30)
sizes = st.integers(1, 5)
worlds = st.integers(1, 4)


def usual(kind: str, count: int, batch_size: int) -> list[int]:
    """What an unprepared loader gives."""
    return [item for batch in make(kind, count, batch_size) for item in values(batch)]


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(KINDS), count=counts, batch_size=sizes, world_size=worlds, even=st.booleans())
def test_every_sample_once_in_the_order_of_an_unprepared_loader(
    kind: str, count: int, batch_size: int, world_size: int, even: bool
) -> None:
    if kind in ("shuffled", "seeded") and count == 0:
        return  # torch refuses to make one
    loaders = ranks_of(kind, count, batch_size, world_size, even_batches=even)
    found = gathered(loaders)
    if kind == "seeded":
        assert sorted(found) == list(range(count))
    else:
        assert found == usual(kind, count, batch_size)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    count=counts,
    batch_size=sizes,
    world_size=worlds,
    even=st.booleans(),
    sparing=st.booleans(),
    drop_last=st.booleans(),
)
def test_each_rank_knows_what_all_hold(
    kind: str, count: int, batch_size: int, world_size: int, even: bool, sparing: bool, drop_last: bool
) -> None:
    if kind in ("shuffled", "seeded") and count == 0:
        return
    loaders = ranks_of(kind, count, batch_size, world_size, even_batches=even, sparing=sparing, drop_last=drop_last)
    hands: list[list[Any]] = []
    for rank, loader in enumerate(loaders):
        hand = []
        for batch in loader:
            assert loader.current is not None
            assert len(values(batch)) == loader.current.rows[rank]
            if kind not in ("stream",):
                assert values(batch) == loader.sample_ids
            hand.append(loader.current)
        hands.append(hand)
        assert loader.iteration == 1
        if kind != "stream":
            assert len(loader) == len(hand)
    if (even or drop_last) and not (drop_last and kind in ("bags", "single")):
        assert len({len(hand) for hand in hands}) == 1
    for number in range(max(len(hand) for hand in hands)):
        told = {hand[number] for hand in hands if number < len(hand)}
        assert len(told) == 1, "ranks do not agree on a round"
        (round_,) = told
        having = [rank for rank, hand in enumerate(hands) if number < len(hand)]
        assert [rank for rank, rows in enumerate(round_.rows) if rows] == having
        if sparing:
            assert all(rows == own or not own for rows, own in zip(round_.rows, round_.real, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    count=counts, share=st.integers(1, 3), world_size=worlds, kind=st.sampled_from(("plain", "custom", "odd", "stream"))
)
def test_split_batches(count: int, share: int, world_size: int, kind: str) -> None:
    size = share * world_size
    loaders = ranks_of(kind, count, size, world_size, split_batches=True)
    for loader in loaders:
        assert loader.total_batch_size == size
    assert gathered(loaders) == usual(kind, count, size)
    if kind != "stream":
        assert len(loaders[0]) == -(-count // size)


def test_a_batch_in_the_middle_that_cannot_be_split_is_named() -> None:
    class Growing(OddBatches):
        def __iter__(self) -> Any:
            yield from ([0, 1], [2, 3, 4], [5, 6])

    loader = DataLoader(Numbers(7), batch_sampler=Growing(range(7), 2, False))
    prepared = prepare(loader, 1, 2, split_batches=True)
    alone: Any = prepared._group
    alone.abort = lambda *args, **kwargs: None
    with pytest.raises(DataError, match=r"samples 2, 3, 4.*cannot be cut into 2") as caught:
        list(prepared)
    assert "multiple of 2" in str(caught.value)


def test_short_batches_in_the_middle_stay_whole() -> None:
    """A bucketing sampler says a batch size and gives fewer now and then."""

    class Buckets(OddBatches):
        def __iter__(self) -> Any:
            yield from ([0, 1, 2], [3], [4, 5, 6], [7, 8])

    made = [prepare(DataLoader(Numbers(9), batch_sampler=Buckets(range(9), 3, False)), rank, 2) for rank in range(2)]
    assert [values(batch) for batch in made[0]] == [[0, 1, 2], [4, 5, 6]]
    assert [values(batch) for batch in made[1]] == [[3], [7, 8, 0]]


def test_indices_may_come_as_arrays() -> None:
    loader = DataLoader(Numbers(5), batch_sampler=[torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([3, 4])])  # type: ignore[arg-type]
    hands = [prepare(loader, rank, 2) for rank in range(2)]
    assert gathered(hands) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_with_workers(workers: int) -> None:
    """Each worker reads a stream of its own: nothing that an unprepared loader gives is lost, or given twice."""
    count, size = 11, 2
    plain = sorted(
        item for batch in DataLoader(Stream(count), batch_size=size, num_workers=workers) for item in values(batch)
    )
    loaders = [prepare(DataLoader(Stream(count), batch_size=size, num_workers=workers), rank, 2) for rank in range(2)]
    assert sorted(gathered(loaders)) == plain


of_any_kind = given(
    stream=st.booleans(),
    count=st.integers(1, 17),
    batch_size=st.integers(1, 4),
    world_size=st.integers(1, 3),
    workers=st.integers(1, 3),
    even=st.booleans(),
    stop=st.integers(0, 3),
)


@settings(max_examples=3, deadline=None)
@of_any_kind
def test_workers_lose_and_repeat_nothing_and_can_be_gone_on_from(**kind: Any) -> None:
    check_workers(**kind)


@pytest.mark.soak
@settings(max_examples=30, deadline=None)
@of_any_kind
def test_workers_of_many_kinds(**kind: Any) -> None:
    check_workers(**kind)


def check_workers(
    *, stream: bool, count: int, batch_size: int, world_size: int, workers: int, even: bool, stop: int
) -> None:
    def loaders(ranks: int) -> list[Any]:
        data: Any = Stream(count) if stream else Numbers(count)
        plain = [DataLoader(data, batch_size=batch_size, num_workers=workers) for _ in range(ranks)]
        return [prepare(one, rank, ranks, even_batches=even) for rank, one in enumerate(plain)]

    expected = sorted([*range(count)] * (workers if stream else 1))
    assert sorted(gathered(loaders(world_size))) == expected
    part: list[int] = []
    states = []
    for rank, loader in enumerate(loaders(world_size)):
        states.append(loader.state_dict())
        for number, batch in enumerate(loader):
            if number == stop:
                break
            part += real(loader, batch, rank)
            states[-1] = loader.state_dict()
    again = loaders(2)
    for loader in again:
        loader.load_state_dict(states[0])
    if len(part) == len(expected):  # a place at the end of an epoch is the beginning of the next
        part = []
    assert sorted(part + gathered(again)) == expected
    assert sorted(gathered(again)) == expected, "the epoch after it is cut as well"


def test_persistent_workers_give_the_same_twice() -> None:
    loader = prepare(
        DataLoader(Stream(9), batch_size=2, num_workers=2, persistent_workers=True), 0, 2, even_batches=True
    )
    first = [values(batch) for batch in loader]
    assert first
    assert [values(batch) for batch in loader] == first
    loader.inner._iterator._shutdown_workers()  # type: ignore[union-attr]


def test_what_a_stream_does_not_know_it_asks_its_data_set() -> None:
    stream = Stream(5)
    stream.name = "mine"  # type: ignore[attr-defined]
    loader = prepare(DataLoader(stream, batch_size=2), 0, 2)
    assert loader.dataset is stream
    assert loader.inner.dataset.name == "mine"
    with pytest.raises(AttributeError):
        _ = loader.inner.dataset.nothing
    with pytest.raises(TypeError):
        len(loader)


def test_splitting_needs_a_size_that_divides() -> None:
    assert check_split(6, 3) == 2
    with pytest.raises(ConfigError, match="cannot be cut into 4"):
        check_split(6, 4)
    with pytest.raises(ValueError, match="fixed batch_size"):
        check_split(None, 2)
    for loader in (DataLoader(Numbers(4), batch_sampler=Bags(4)), DataLoader(Stream(4), batch_size=3)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            prepare(loader, 0, 2, split_batches=True)
