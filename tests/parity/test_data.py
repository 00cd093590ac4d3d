"""Which samples each rank sees, in which order, and what a loader says of itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.parity.compare import differences, raises
from tests.parity.run import Runs

EPOCHS = 2


def test_map_style_orders_are_the_same(runs: Runs) -> None:
    assert differences(runs, "order/map/", "order/torch batch sampler/", without=("remainder", "length")) == []
    uneven_split = [name for name in runs.names("order/map/") if "even_batches=False split_batches=True" in name]
    others = [name for name in runs.names("order/map/") if name not in uneven_split]
    assert differences(runs, *others, "order/torch batch sampler/", without=("remainder",)) == []


@pytest.mark.parametrize("kind", ["iterable", "sized iterable"])
def test_iterable_orders_are_the_same(runs: Runs, kind: str) -> None:
    even = [name for name in runs.names(f"order/{kind}/") if runs.world_size == 1 or "even_batches=True" in name]
    # On several processes, Accelerate's sizes of an iterable are those of one rank's share.
    sizes = ("length", "total_batch_size", "total_dataset_length")
    assert differences(runs, *even, without=("remainder", *(sizes if runs.world_size > 1 else ()))) == []


def test_a_loader_knows_how_many_batches_it_gives(runs: Runs) -> None:
    # Ours to choose: with split batches Accelerate counts batches that an uneven rank does not get, and those of a
    # sized iterable by the whole batch size.
    wrong = []
    for name in runs.names("order/"):
        for _, ours in runs.pairs(name):
            if not raises(ours) and not raises(ours["length"]) and ours["length"] * EPOCHS != len(ours["batches"]):
                wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize("kind", ["iterable", "sized iterable"])
def test_an_iterable_can_stay_uneven(runs: Runs, kind: str) -> None:
    # Ours to choose: Accelerate repeats samples of an iterable whatever even_batches says.
    for name in runs.names(f"order/{kind}/"):
        if "drop_last=False even_batches=False" in name:
            samples = int(name.split("samples=")[1].split()[0])
            assert sorted(_samples(ours for _, ours in runs.pairs(name))) == sorted([*range(samples)] * EPOCHS), name


def test_batch_samplers_without_a_batch_size(runs: Runs) -> None:
    # Accelerate has no total_batch_size for them (it raises); ours is None.
    assert differences(runs, "order/own batch sampler/", without=("remainder", "total_batch_size")) == []
    for _, ours in runs.pairs("order/own batch sampler/samples=5 even_batches=True"):
        assert ours["total_batch_size"] is None


def test_samples_that_are_not_batched(runs: Runs) -> None:
    if runs.world_size == 1:
        assert differences(runs, "order/batch_size None/", without=("remainder", "total_batch_size")) == []
        return
    # Ours to choose: Accelerate fails, we deal the samples one by one.
    name = "order/batch_size None/samples=6 even_batches=True"
    assert all(raises(theirs) for theirs, _ in runs.pairs(name))
    assert [ours["batches"] for _, ours in runs.pairs(name)] == [[0, 2, 4] * EPOCHS, [1, 3, 5] * EPOCHS]


def test_a_batch_that_cannot_be_split_is_refused_by_both(runs: Runs) -> None:
    assert differences(runs, "order/batch indivisible by ranks", without=("remainder",), may_raise=True) == []
    assert all(raises(ours) is (runs.world_size > 1) for _, ours in runs.pairs("order/batch indivisible by ranks"))


def test_split_batches_given_to_the_constructor_is_honoured(runs: Runs) -> None:
    # Ours to choose: Accelerate takes the argument and does nothing with it.
    asked, configured = (
        runs.pairs("order/split asked of the constructor"),
        runs.pairs("order/map/samples=8 batch=4 drop_last=False even_batches=True split_batches=True"),
    )
    for (theirs, ours), (their_split, our_split) in zip(asked, configured, strict=True):
        assert ours == our_split
        assert ours["batches"] == their_split["batches"]
        assert (theirs["batches"] == their_split["batches"]) is (runs.world_size == 1)


def test_what_rank_0_reads_for_all_goes_to_the_same_ranks(runs: Runs) -> None:
    # Whole rounds only: what is left over at the end, Accelerate cuts into smaller batches; we fill up as elsewhere.
    assert differences(runs, "dispatch/map/", without=("remainder", "length", "total_batch_size")) == []


def test_skipping_leaves_the_same_batches(runs: Runs) -> None:
    assert len(runs.names("skip/")) == 6
    assert differences(runs, "skip/") == []


def test_shuffled_orders_are_the_same(runs: Runs) -> None:
    # And so are the random numbers that the script draws afterwards.
    assert len(runs.names("shuffle/")) == 8
    assert differences(runs, "shuffle/") == []


def test_positions_of_nested_and_interrupted_loops(runs: Runs) -> None:
    assert differences(runs, "nested loaders", "stopped early", without=("remainder",)) == []


def test_the_remainder_is_known_from_the_first_batch_on(runs: Runs) -> None:
    seen = set()
    for name in runs.names("order/map/"):
        for theirs, ours in runs.pairs(name):
            last = [place for place in ours["places"] if place["end_of_dataloader"]]
            if "drop_last=False even_batches=True" in name:
                assert ours["places"] == theirs["places"], name
                seen |= {place["remainder"] for place in ours["places"]}
            # Ours to choose: Accelerate says -1 on the last batch too where incomplete ones are dropped.
            if "drop_last=True" in name:
                assert all(place["remainder"] == -1 for place in ours["places"] if not place["end_of_dataloader"])
                assert all(place["remainder"] == 0 for place in last)
    assert seen >= {0, 1, 3}


def _samples(notes: Iterable[dict[str, Any]]) -> list[int]:
    return [sample for note in notes for batch in note["batches"] for sample in batch]
