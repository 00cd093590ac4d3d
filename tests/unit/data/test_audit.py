"""What the audit says about an epoch."""

from __future__ import annotations

import dataclasses

import torch
from torch.utils.data import Subset

from lockstep.data.audit import Report, _identity, _resolve, judge

FINE = Report(length=6, bottom=6, identity="", presharded=False, complete=True, repeated=0)


def counts(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_nothing_to_say() -> None:
    assert judge([FINE, FINE], counts(1, 1, 1, 1, 1, 1)) == ("", False)


def test_padding_is_told_and_is_no_warning() -> None:
    padded = dataclasses.replace(FINE, repeated=2)
    text, warn = judge([FINE, padded], counts(1, 1, 1, 1, 1, 1))
    assert text.startswith("2 samples were repeated")
    assert not warn


def test_a_loader_that_was_dealt_before() -> None:
    before = dataclasses.replace(FINE, presharded=True, complete=False, length=6)
    text, warn = judge([before, before], counts(1, 0, 0, 1, 0, 0))
    assert warn
    assert "4 of 6 samples were never seen" in text
    assert "DistributedSampler" in text
    assert "shuffle=True" in text


def test_splits_that_differ() -> None:
    one = dataclasses.replace(FINE, length=3, identity="a")
    other = dataclasses.replace(FINE, length=3, identity="b")
    text, warn = judge([one, other], counts(2, 1, 0, 0, 0, 1))
    assert warn
    assert "other samples on each rank" in text
    assert "1 samples were seen by several ranks, and 3 by none" in text
    assert "random_split" in text


def test_lengths_that_differ() -> None:
    text, warn = judge([FINE, dataclasses.replace(FINE, length=5, bottom=5)], None)
    assert warn
    assert "lengths 5, 6" in text


def test_orders_that_differ() -> None:
    text, warn = judge([FINE, FINE], counts(2, 2, 1, 1, 0, 0))
    assert warn
    assert "2 of 6 samples were never seen, and 2 were seen by several ranks" in text


def test_an_order_that_is_not_meant_to_be_complete_is_left_alone() -> None:
    some = dataclasses.replace(FINE, complete=False)
    assert judge([some, some], counts(2, 2, 1, 1, 0, 0)) == ("", False)


def test_subsets_are_looked_through() -> None:
    data = Subset(Subset(range(10), [9, 8, 7, 6, 5]), [0, 2])  # type: ignore[arg-type]
    bottom, indices = _resolve(data, torch.tensor([1, 0]))
    assert (bottom, indices.tolist()) == (10, [7, 9])
    assert _identity(data) != _identity(Subset(Subset(range(10), [9, 8, 7, 6, 5]), [0, 1]))  # type: ignore[arg-type]
    assert _identity(range(10)) == ""
