"""Checksums of parameters: equal where the values are, and what differs in words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.replicas import Checksums, checksums, difference

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.complex64)


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(size) * 100).to(dtype)


@given(size=st.integers(1, 70), place=st.integers(0, 69), dtype=st.sampled_from(DTYPES))
def test_any_value_that_changes_is_seen(size: int, place: int, dtype: torch.dtype) -> None:
    one = values(size, dtype)
    assert checksums(1, [one]) == checksums(1, [one.clone()])
    other = one.clone()
    other[place % size] += 1 if not dtype.is_floating_point else 1 + abs(other[place % size])
    assert checksums(1, [one]) != checksums(1, [other])


@given(rows=st.integers(2, 90), columns=st.integers(1, 90), seed=st.integers(0, 2**31))
def test_values_that_change_places_are_seen(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(rows, 2 * columns, generator=generator)
    order = torch.randperm(rows, generator=generator)
    first, second = order[:2].tolist()
    swapped = one.clone()
    swapped[[first, second]] = one[[second, first]]
    for other in (swapped, one.flip(0), one.flip(1), one.roll(2, 1) if columns > 1 else -one):
        assert checksums(1, [one]) != checksums(1, [other])


@given(size=st.integers(2, 200), places=st.sets(st.integers(0, 199), min_size=1), dtype=st.sampled_from(DTYPES))
def test_values_that_change_their_signs_are_seen(size: int, places: set[int], dtype: torch.dtype) -> None:
    """A sum of the bits alone loses every second sign: they are the highest bits, which overflow."""
    one = (torch.arange(size) % 100 + 1).to(dtype)
    other = one.clone()
    for place in {place % size for place in places}:
        other[place] = -one[place]
    assert checksums(1, [one]) != checksums(1, [other])


@pytest.mark.parametrize("rows", [10, 12, 300_000])
def test_all_signs_at_once_too(rows: int) -> None:
    for seed in range(400 if rows < 100 else 2):
        one = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed))
        assert checksums(1, [one]) != checksums(1, [-one])


@pytest.mark.parametrize("size", [2047, 4095, 4096, 4097, 100_003])
def test_large_tensors_too(size: int) -> None:
    torch.manual_seed(size)
    one = torch.randn(size)
    for place in (0, 1, size // 2, size - 1):
        other = one.clone()
        other[place] += 1
        assert checksums(1, [one]) == checksums(1, [one.clone()]) != checksums(1, [other])
    assert checksums(1, [one]) != checksums(1, [one.flip(0)])
    assert checksums(1, [one]) != checksums(1, [one.roll(2048)])


def test_how_a_tensor_lies_in_memory_does_not_matter() -> None:
    table = torch.randn(6, 5)
    whole = torch.cat([torch.zeros(1), table.flatten()])[1:].view(6, 5)  # begins at four bytes
    assert whole.storage_offset() == 1
    for same in (table.t().contiguous().t(), whole, table.clone().requires_grad_()):
        assert checksums(0, [same]) == checksums(0, [table])
    assert checksums(0, [torch.zeros(0), torch.tensor(1.0)]).sums[0] == 0
    assert checksums(0, []).sums == ()


@given(st.integers(0, 2**40), st.lists(st.integers(0, 2**64 - 1), max_size=9), st.binary(max_size=30))
def test_they_travel_and_what_is_none_of_them_is_refused(steps: int, sums: list[int], data: bytes) -> None:
    there = Checksums(steps=steps, sums=tuple(sums))
    assert Checksums.unpack(there.pack()) == there
    assert Checksums.unpack(there.pack() + b"\0") is None
    Checksums.unpack(data)


@pytest.mark.parametrize(
    ("of_ranks", "words"),
    [
        ([(1, 2, 3)], None),
        ([(1, 2, 3), (1, 2, 3)], None),
        ([(1, 2, 3), (1, 5, 3)], "rank 1 has other values than rank 0 in b"),
        ([(1, 5, 3), (1, 2, 3), (1, 2, 3)], "rank 0 has other values than ranks 1-2 in b"),
        ([(1, 2, 3), (1, 2, 3), (4, 5, 6), (7, 8, 9)], "ranks 2-3 have other values than ranks 0-1 in a, b, c"),
    ],
)
def test_who_differs_from_the_most_and_in_what(of_ranks: list[tuple[int, ...]], words: str | None) -> None:
    found = {rank: Checksums(steps=1, sums=sums) for rank, sums in enumerate(of_ranks)}
    assert difference(found, ["a", "b", "c"]) == words


def test_many_parameters_are_counted() -> None:
    found = {rank: Checksums(steps=1, sums=(rank,) * 9) for rank in range(2)}
    assert difference(found, [f"p{number}" for number in range(9)]) == (
        "rank 1 has other values than rank 0 in p0, p1, p2 and 6 more"
    )
