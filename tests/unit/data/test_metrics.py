"""Joining what ranks computed: which samples stay, in which order, and what is complained about."""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.metrics import BatchCounts, Joiner, _pack, _PackedTensor, form_of
from lockstep.errors import DistributedOperationException


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Answer:
    texts: Any
    scores: Any


@st.composite
def shares(draw: st.DrawFn) -> BatchCounts:
    """Any round: uneven batches, ranks with nothing but repeats, but at least one real sample."""
    rows = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    real = [draw(st.integers(0, count)) for count in rows]
    real[0] = max(real[0], 1)
    return BatchCounts(tuple(rows), tuple(real))


def names(share: BatchCounts, per_sample: int = 1) -> tuple[list[list[str]], list[str]]:
    """For each rank the names of its items, and those that are of real samples."""
    each = [
        [f"rank {rank} sample {number} item {item}" for number in range(rows) for item in range(per_sample)]
        for rank, rows in enumerate(share.rows)
    ]
    real = [name for rank, part in enumerate(each) for name in part if int(name.split()[3]) < share.real[rank]]
    return each, real


@given(shares(), st.integers(0, 3))
def test_samples_that_are_repeats_are_dropped_and_no_others(share: BatchCounts, per_sample: int) -> None:
    each, real = names(share, per_sample)
    joiner = Joiner(share)
    assert joiner.join(each) == real
    assert joiner.join([{"a": tuple(part), "b": [part]} for part in each])["a"] == real
    numbers = {name: place for place, name in enumerate(name for part in each for name in part)}
    rows = [torch.tensor([[numbers[name]] * 2 for name in part]).view(-1, 2) for part in each]
    assert joiner.tensor(rows, False)[:, 0].tolist() == [numbers[name] for name in real]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.data())
def test_items_of_a_padded_short_batch_are_dropped(size: int, ranks: int, per_sample: int, data: st.DataObject) -> None:
    left = data.draw(st.integers(1, size * ranks))
    rows = [min(size, left - rank * size) for rank in range(ranks) if left > rank * size]  # even_batches=False
    share = BatchCounts(tuple(rows), tuple(rows), size)
    padded = [size * per_sample] * len(rows)
    assert share.real_items([count * per_sample for count in rows], per_sample) == tuple(
        count * per_sample for count in rows
    )
    assert share.real_items(padded, per_sample) == tuple(count * per_sample for count in rows)
    if per_sample == 1 or len(set(rows)) > 1:
        assert share.real_items(padded) == tuple(count * per_sample for count in rows)  # it shows without knowing
    odd = [count * per_sample + size + 1 for count in rows]
    fits = any(odd == [multiple * count for count in rows] for multiple in range(40))
    assert fits or share.real_items(odd) == tuple(odd) or all(count % size == 0 for count in odd)


@given(shares(), st.lists(st.integers(0, 12), min_size=5, max_size=5))
def test_what_fits_no_sample_is_kept_and_complained_about(share: BatchCounts, lengths: list[int]) -> None:
    counts = lengths[: len(share.rows)]
    fits = share.real == share.rows or any(counts == [multiple * rows for rows in share.rows] for multiple in range(13))
    joiner = Joiner(share)
    joined = joiner.join([["x"] * count for count in counts])
    assert fits == (not joiner.complaints)
    if not fits:
        assert len(joined) == sum(counts)
        (text,) = joiner.complaints.values()
        assert f"{counts} objects" in text
        assert f"{list(share.rows)} samples" in text
        assert f"{sum(share.rows) - sum(share.real)} repeated samples" in text


@given(shares())
def test_one_value_per_rank_is_passed_without_complaint_only_if_its_mean_is_right(share: BatchCounts) -> None:
    # So unlike each other, and exact, that means agree only when every real sample counts the same.
    losses = [[Fraction(10 ** (7 * rank + number)) for number in range(rows)] for rank, rows in enumerate(share.rows)]
    means = [sum(part) / len(part) for part in losses]
    true = [loss for part, real in zip(losses, share.real, strict=True) for loss in part[:real]]
    kept = [mean for mean, real in zip(means, share.real, strict=True) if real]
    joiner = Joiner(share)
    joined = joiner.tensor([torch.tensor(rank) for rank in range(len(means))], True)
    assert [means[rank] for rank in joined.tolist()] == kept
    assert (sum(kept) / len(kept) == sum(true) / len(true)) == (not joiner.complaints)
    assert Joiner(share).join([{"loss": mean} for mean in means]) == {"loss": kept}
    for text in joiner.complaints.values():
        assert 'F.cross_entropy(..., reduction="none")' in text
        assert "weight each rank's value by its real samples" in text


def test_a_name_or_flag_per_rank_is_no_average() -> None:
    joiner = Joiner(BatchCounts((2, 2, 2), (2, 1, 0)))
    assert joiner.join([{"split": "test", "done": True}] * 3) == {"split": ["test"] * 2, "done": [True, True]}
    assert not joiner.complaints
    assert joiner.join([{"loss": np.float32(1.0)}] * 3) == {"loss": [1.0, 1.0]}
    assert list(joiner.complaints) == ["value"]
    assert "at ['loss']" in joiner.complaints["value"]


def test_without_a_round_nothing_is_dropped_and_nothing_complained_about() -> None:
    joiner = Joiner(None)
    parts = [{"a": ["x", "y"], "b": torch.tensor([1.0]), "c": 5}, {"a": ["z"], "b": torch.tensor([2.0]), "c": 6}]
    joined = joiner.join(parts)
    assert joined.pop("b").tolist() == [1.0, 2.0]
    assert joined == {"a": ["x", "y", "z"], "c": [5, 6]}
    assert joiner.tensor([torch.tensor(1), torch.tensor(2)], True).tolist() == [1, 2]
    assert not joiner.complaints


T = torch.zeros(2)


@pytest.mark.parametrize(
    ("value", "form", "as_objects"),
    [
        (T, "tensor", "tensor"),
        ({"a": 1}, "record", "record"),
        (OrderedDict(a=1), "record", "record"),
        (Pair(1, 2), "record", "record"),
        (Answer(1, 2), "record", "record"),
        (["a", "b"], "samples", "samples"),
        (("a", "b"), "samples", "samples"),
        ([], "samples", "samples"),
        ([["the", "cat"], ["a", "dog"]], "samples", "samples"),
        ([{"text": "a"}], "samples", "samples"),
        (({"text": "a"},), "samples", "samples"),
        ((["a"], ["b"]), "record", "record"),
        ((("a",), "b"), "record", "record"),
        ([T, "a"], "record", "samples"),
        ((T, "a"), "record", "samples"),
        ((T, ["a"]), "record", "record"),
        (np.zeros(3), "samples", "samples"),
        (np.array(3.0), "value", "value"),
        ({1, 2}, "samples", "samples"),
        ("text", "value", "value"),
        (b"text", "value", "value"),
        (3, "value", "value"),
        (None, "value", "value"),
    ],
)
def test_forms(value: Any, form: str, as_objects: str) -> None:
    assert form_of(value) == form
    assert form_of(value, as_objects=True) == as_objects


def test_nested_structures_are_joined_field_by_field() -> None:
    share = BatchCounts((2, 2), (2, 1))

    def part(rank: int) -> Any:
        mark = "ab"[rank]
        return {
            "answers": Answer([f"{mark}0", f"{mark}1"], torch.tensor([10 * rank, 10 * rank + 1])),
            "pair": Pair((f"{mark}2", f"{mark}3"), [torch.tensor([[rank], [rank + 5]]), ["x", mark]]),
            "both": ([{"text": mark}, {"text": "repeat" * rank}], [[mark, mark], [rank]]),
        }

    joined = Joiner(share).join([part(0), part(1)])
    assert list(joined) == ["answers", "pair", "both"]
    assert isinstance(joined["answers"], Answer)
    assert joined["answers"].texts == ["a0", "a1", "b0"]
    assert joined["answers"].scores.tolist() == [0, 1, 10]
    assert isinstance(joined["pair"], Pair)
    assert joined["pair"].first == ["a2", "a3", "b2"]
    assert joined["pair"].second[0].tolist() == [[0], [5], [1]]
    assert joined["pair"].second[1] == ["x", "a", "x"]
    assert joined["both"] == ([{"text": "a"}, {"text": ""}, {"text": "b"}], [["a", "a"], [0], ["b", "b"]])


def test_as_objects_tensors_in_a_list_belong_to_single_samples() -> None:
    parts = [[torch.ones(3), torch.ones(1)], [torch.zeros(2), torch.zeros(5)]]
    joined = Joiner(BatchCounts((2, 2), (2, 1)), as_objects=True).join(parts)
    assert [tensor.tolist() for tensor in joined] == [[1.0] * 3, [1.0], [0.0] * 2]


def test_the_order_of_keys_may_differ() -> None:
    joined = Joiner(None).join([{"a": ["1"], "b": ["2"]}, {"b": ["4"], "a": ["3"]}])
    assert joined == {"a": ["1", "3"], "b": ["2", "4"]}


def test_a_list_that_is_empty_on_one_rank() -> None:
    assert Joiner(None).join([[], ["a"], ()]) == ["a"]
    assert Joiner(None).join([[], []]) == []


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([["a"], {"a": 1}], "different types .*list; dict"),
        ([{"a": ["1"]}, {"b": ["1"]}], r"different fields .*dict of \['a'\]; dict of \['b'\]"),
        ([{"x": (["1"], ["2"])}, {"x": (["1"],)}], r"different fields at \['x'\] .*tuple of 2; tuple of 1"),
        ([[], [torch.ones(1), "x"]], "different fields .*list of 0; list of 2"),
        ([torch.ones(2, 3), torch.ones(2, 4)], r"shapes or dtypes .*\[2, 3\] torch.float32; \[2, 4\]"),
        ([torch.ones(2), torch.ones(2, dtype=torch.int64)], "shapes or dtypes"),
        ([torch.ones(()), torch.ones(1)], "shapes or dtypes"),
    ],
)
def test_ranks_with_different_structures(parts: list[Any], named: str) -> None:
    with pytest.raises(DistributedOperationException, match=named):
        Joiner(None).join(parts)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3,), (2, 3)])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_a_tensor_among_objects_arrives_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    arrived = pickle.loads(pickle.dumps(_PackedTensor(tensor))).open(torch.device("cpu"))
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(arrived, tensor)


def test_unusual_tensors_among_objects() -> None:
    base = torch.arange(12.0, requires_grad=True).view(3, 4)
    with torch.inference_mode():
        inferred = torch.ones(2)
    for tensor in (base, base.t(), base[:, 1], base[:1].expand(3, 4), base.to_sparse(), inferred):
        arrived = _PackedTensor(tensor).open(torch.device("cpu"))
        assert not arrived.requires_grad
        assert torch.equal(arrived, tensor.detach().to_dense())
    complex_ = torch.tensor([1 + 2j]).conj()
    assert torch.equal(_PackedTensor(complex_).open(torch.device("cpu")), complex_)
    assert len(pickle.dumps(_PackedTensor(torch.ones(1_000_000)[:2]))) < 1000


def test_what_can_only_be_iterated_travels_as_a_list() -> None:
    assert _pack((text for text in "ab"), False) == ["a", "b"]
    assert _pack({"a": deque([1, 2])}, False) == {"a": [1, 2]}
    assert [row.tolist() for row in _pack(np.ones((2, 2)), False)] == [[1, 1], [1, 1]]
