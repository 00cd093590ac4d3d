"""What the audit says about an epoch."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, Subset

from lockstep.data.audit import Audit, RankAudit, _identity, _resolve, count, judge
from lockstep.data.global_batch import GlobalBatch
from lockstep.job_store.signed_store import SignedStore

FINE = RankAudit(length=6, bottom=6, identity="", presharded=False, complete=True, repeated=0)


def counts(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def test_nothing_is_wrong() -> None:
    assert judge([FINE, FINE], counts(1, 1, 1, 1, 1, 1)) == ("", False)


def test_padding_is_reported_and_is_not_a_warning() -> None:
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


def test_bitmaps_add_up_to_none_one_and_several() -> None:
    bitmaps = [b"\xe0\x80", b"\xa0\x00", b"\x20\x00"]  # samples 0 1 2 8; 0 2; 2
    found = count(bitmaps, 9)
    assert found is not None
    assert found.tolist() == [2, 1, 2, 0, 0, 0, 0, 0, 1]
    assert count([b"\xe0\x80", b"\xa0"], 9) is None, "a bitmap of another length"
    assert count([b"", b""], 9) is None


def test_of_different_epochs_the_counts_are_not_compared() -> None:
    later = dataclasses.replace(FINE, epoch=1)
    assert judge([FINE, later], counts(2, 2, 1, 1, 0, 0)) == ("", False)
    assert judge([FINE, later], None) == ("", False)
    assert "lengths 5, 6" in judge([FINE, dataclasses.replace(later, length=5)], None)[0]


def audit_of(dataset: Any, seen: list[int]) -> Audit:
    audit = Audit.of(DataLoader(dataset, batch_size=2), "a loader", 0)
    assert audit is not None
    audit.saw(GlobalBatch(start=0, rows=(len(seen),), real=(len(seen),), ids=tuple(seen)), 0)
    return audit


def result_of(seen: list[int], world_size: int) -> tuple[RankAudit, bytes]:
    result = audit_of(list(range(1000)), seen)._result(world_size)
    assert result is not None
    return result


def test_with_too_many_ranks_for_bitmaps_a_checksum_takes_their_place() -> None:
    many = 10**6
    even, odd = list(range(0, 1000, 2)), list(range(1, 1000, 2))
    assert len(result_of(even, 2)[1]) == 125
    assert result_of(even, many)[1] == b""

    def finding(*shares: list[int]) -> tuple[str, bool]:
        return judge([result_of(share, many)[0] for share in shares], None)

    assert finding(even, odd) == ("", False)
    assert finding(even[::-1], odd) == ("", False)
    for shares in ((even, even), (even, odd[1:]), (even, [*odd[1:], 0])):
        text, warn = finding(*shares)
        assert "some of 1000 samples were never seen, or were seen by several ranks" in text
        assert warn


def test_a_subset_by_names_is_left_alone() -> None:
    named = Subset({"a": 1, "b": 2}, ["a", "b"])  # type: ignore[arg-type]
    assert audit_of(named, [0, 1])._result(2) is None


def test_the_last_rank_logs_and_nobody_waits_for_a_store_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    key = "generation_0/{}".format
    first: Any = SimpleNamespace(rank=0, world_size=2, key=key, store=SignedStore(server, "secret"))
    second: Any = SimpleNamespace(rank=1, world_size=2, key=key, store=SignedStore(client, "secret"))
    one, other = audit_of(list(range(4)), [0, 1]), audit_of(list(range(4)), [0, 1])
    other.finish(second)
    assert caplog.text == ""
    one.finish(first)
    assert "2 of 4 samples were never seen, and 2 were seen by several ranks" in caplog.text
    assert client.num_keys() == 0
    caplog.clear()
    first.store = None
    del server
    other.finish(second)
    assert caplog.text == ""
