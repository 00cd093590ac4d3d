"""One process is a world of one: metrics hold each sample of an evaluation once, whatever the script passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep import Accelerator
from tests.datasets import Numbers, SizedStream, Stream

KINDS: dict[str, Any] = {"map": Numbers, "stream": Stream, "sized": SizedStream}


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@dataclass
class Answer:
    scores: Tensor
    names: list[str]


def evaluated(accelerator: Accelerator, data: Any, batch_size: int, **options: Any) -> Iterator[tuple[Tensor, Any]]:
    loader = accelerator.prepare(DataLoader(data, batch_size=batch_size, **options))
    for batch in loader:
        yield batch, accelerator.gather_for_metrics


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 14),
    st.integers(1, 6),
    st.booleans(),
    st.lists(st.integers(1, 3), max_size=3),
)
def test_each_sample_counts_once(
    accelerator: Accelerator, kind: str, count: int, batch_size: int, drop_last: bool, per_sample: list[int]
) -> None:
    due = list(range(count - count % batch_size if drop_last else count))
    found: dict[str, list[Any]] = {name: [] for name in ("rows", "mean", "objects", "padded", "names")}
    several: list[list[int]] = [[] for _ in per_sample]
    for batch, gather in evaluated(accelerator, KINDS[kind](count), batch_size, drop_last=drop_last):
        found["rows"] += gather(batch).tolist()
        found["mean"] += gather(batch.float().mean().repeat(batch_size)).tolist()
        found["objects"] += gather(["x"] * batch_size)
        static = torch.cat([batch, torch.full((batch_size - len(batch),), -1)])  # one shape for a compiled model
        answer = gather({"padded": (static, [static])})
        assert torch.equal(answer["padded"][0], answer["padded"][1][0])
        found["padded"] += answer["padded"][0].tolist()
        found["names"] += gather(Answer(static, [str(number) for number in static.tolist()])).names
        for place, multiple in enumerate(per_sample):
            several[place] += gather(batch.repeat_interleave(multiple)).tolist()
    assert found["rows"] == found["padded"] == due
    assert found["names"] == [str(number) for number in due]
    assert [len(found["mean"]), len(found["objects"])] == [len(due)] * 2
    if count >= batch_size:  # else nothing tells several rows for each sample from a padded batch
        assert several == [[number for number in due for _ in range(multiple)] for multiple in per_sample]


def test_what_a_batch_alone_shows_is_taken_as_accelerate_takes_it(accelerator: Accelerator) -> None:
    (found,) = [gather(torch.arange(4)) for _, gather in evaluated(accelerator, Numbers(2), 4)]
    assert found.tolist() == [0, 1]
    (found,) = [gather(torch.arange(6)) for _, gather in evaluated(accelerator, Numbers(2), 4)]
    assert found.tolist() == list(range(6))  # no full batch has 6 rows: 3 for each sample


def test_types_stay_what_they_are(accelerator: Accelerator) -> None:
    scalar, rows = torch.tensor(3.0), torch.arange(4)
    values: dict[str, tuple[Any, Any]] = {
        "a scalar": (scalar, scalar),
        "scalars": ({"loss": scalar, "rows": rows}, {"loss": scalar, "rows": rows[:2]}),
        "a tuple": (tuple("abcd"), ("a", "b")),
        "an array": (np.arange(4), np.arange(2)),
        "text": ("text", "text"),
        "a number": (4, 4),
        "nothing": (None, None),
        "an empty list": ([], []),
        "a set": ({1, 2, 3, 4}, {1, 2, 3, 4}),
        "columns": (([1] * 4, ["a"] * 4), ([1] * 2, ["a"] * 2)),
        "a column of one": (([1], ["a"]), ([1], ["a"])),
        "a view": (MappingProxyType({"rows": [1, 2]}), MappingProxyType({"rows": [1, 2]})),
        "more than a batch": (list(range(7)), list(range(7))),
    }
    *_, (_, gather) = evaluated(accelerator, Numbers(6), 4)
    for name, (value, _) in values.items():  # the loop is over: nothing is dropped
        assert gather(value) is value, name
    loader = accelerator.prepare(DataLoader(Numbers(6), batch_size=4))
    for batch in loader:
        for name, (value, expected) in values.items():
            found = gather(value)
            if len(batch) == 4:
                assert found is value, name
                continue
            assert type(found) is type(value), name
            assert str(found) == str(expected), name


def test_objects_are_asked_for(accelerator: Accelerator) -> None:
    for batch, gather in evaluated(accelerator, Numbers(6), 4):
        assert gather(torch.arange(4), use_gather_object=True).tolist() == list(range(len(batch)))
        rows = [torch.arange(number) for number in range(4)]
        assert len(gather(rows, use_gather_object=True)) == len(batch)
        assert [len(row) for row in gather(rows)] == [0, 1, 2, 3]  # no full batch's worth


def test_a_loop_in_a_loop_counts_its_own_rows(accelerator: Accelerator) -> None:
    outer = accelerator.prepare(DataLoader(Numbers(6), batch_size=4))
    inner = accelerator.prepare(DataLoader(Numbers(3), batch_size=2))
    seen: list[int] = []
    for batch in outer:
        texts = accelerator.gather_for_metrics(batch.repeat_interleave(2)).tolist()
        assert texts == batch.repeat_interleave(2).tolist()
        for other in inner:
            seen += accelerator.gather_for_metrics(torch.cat([other, other])[:2]).tolist()
    assert seen == [0, 1, 2] * 2
