"""Going on in the middle of an epoch, on any number of processes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lockstep import skip_first_batches
from lockstep.data.loader import PreparedDataLoader
from lockstep.errors import ConfigError, DataError, UsageError
from tests.datasets import Numbers, Stream

from .ranks import KINDS, OddBatches, gathered, make, prepare, ranks_of, real, values


def walk(loaders: list[PreparedDataLoader], rounds: int) -> tuple[list[int], list[dict[str, Any]]]:
    """So many rounds of an epoch: the samples, and every rank's state in the body of the last one."""
    seen: dict[int, list[int]] = {}
    states = [loader.state_dict() for loader in loaders]
    for rank, loader in enumerate(loaders):
        if not rounds:
            continue
        for number, batch in enumerate(loader):
            seen.setdefault(number, []).extend(real(loader, batch, rank))
            states[rank] = loader.state_dict()
            if number + 1 == rounds:
                break
    return [item for number in sorted(seen) for item in seen[number]], states


def whole(loaders: list[PreparedDataLoader]) -> list[int]:
    return gathered(loaders)


@settings(max_examples=250, deadline=None)
@given(
    kind=st.sampled_from([kind for kind in KINDS if kind != "odd"]),
    count=st.integers(1, 30),
    batch_size=st.integers(1, 4),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    stops=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_a_state_goes_on_anywhere_twice_in_a_row(
    kind: str, count: int, batch_size: int, worlds: tuple[int, int, int], stops: tuple[int, int]
) -> None:
    undisturbed = ranks_of(kind, count, batch_size, 1)
    epochs = [whole(undisturbed) for _ in range(4)]
    found: list[int] = []
    states: list[dict[str, Any]] | None = None
    for world_size, rounds in zip(worlds, (*stops, None), strict=True):
        loaders = ranks_of(kind, count, batch_size, world_size)
        if states is not None:
            saved = pickle.loads(pickle.dumps(states[-1]))
            assert all(str(one["places"]) == str(saved["places"]) for one in states)
            for loader in loaders:
                loader.load_state_dict(saved)
        if rounds is None:
            found += whole(loaders)
            assert found == epochs[0]
            assert whole(loaders) == epochs[1], "the next epoch has not the next permutation"
        else:
            part, states = walk(loaders, rounds)
            found += part
            complete = all(state["places"] == [0] for state in states)
            assert not (complete and part)
            if part and len(found) == count:  # a place at the end of an epoch is the beginning of the next
                assert found == epochs.pop(0)
                found = []


def test_nothing_that_was_passed_over_is_read() -> None:
    loader = make("shuffled", 20, 2)
    prepared = prepare(loader, 0, 1)
    state = walk([prepared], 6)[1][0]
    again = prepare(make("shuffled", 20, 2), 0, 1)
    again.load_state_dict(state)
    rest = [values(batch) for batch in again]
    assert len(rest) == 4
    assert len(again.dataset.read) == 8
    skipped = make("shuffled", 20, 2)
    assert [values(batch) for batch in skip_first_batches(skipped, 6)] == rest
    assert len(skipped.dataset.read) == 8  # type: ignore[attr-defined]


def test_what_is_left_is_known_after_resuming() -> None:
    state = walk(ranks_of("plain", 20, 2, 2), 2)[1][0]
    for world_size, expected in ((1, 6), (2, 3), (3, 2), (4, 2)):
        loader = ranks_of("plain", 20, 2, world_size)[0]
        loader.load_state_dict(state)
        left = []
        for _ in loader:
            left.append(loader.remaining)
        assert left == list(range(expected, 0, -1))
        assert len(loader) == -(-20 // (2 * world_size))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_from_the_last_batch_begins_the_next_epoch(kind: str) -> None:
    first = ranks_of(kind, 9, 2, 2)
    _, states = walk(first, 99)
    original = whole(first)
    for world_size in (1, 2):
        second = ranks_of(kind, 9, 2, world_size)
        for loader in second:
            loader.load_state_dict(states[0])
            assert loader.iteration == 1
            loader.set_epoch(1)
        assert whole(second) == original
        assert [loader.iteration for loader in second] == [2] * world_size


def test_between_epochs_the_next_one_is_kept() -> None:
    first = ranks_of("shuffled", 9, 2, 1)
    whole(first)
    state = first[0].state_dict()
    second = ranks_of("shuffled", 9, 2, 1)
    second[0].load_state_dict(state)
    assert second[0].iteration == 1
    assert whole(second) == whole(first)


def test_a_state_that_was_loaded_can_be_saved_before_it_is_used() -> None:
    state = walk(ranks_of("shuffled", 20, 2, 2), 2)[1][0]
    passed_on = ranks_of("shuffled", 20, 2, 3)[0]
    passed_on.load_state_dict(state)
    last = ranks_of("shuffled", 20, 2, 1)
    last[0].load_state_dict(passed_on.state_dict())
    other = ranks_of("shuffled", 20, 2, 1)
    other[0].load_state_dict(state)
    assert whole(last) == whole(other)


def test_an_order_from_the_global_generator_goes_on() -> None:
    """One process, no generator given: torch's own seeds the order."""
    torch.manual_seed(5)
    loader = prepare(DataLoader(Numbers(12), batch_size=2, shuffle=True), 0, 1)
    part, [state] = walk([loader], 3)
    torch.manual_seed(99)
    again = prepare(DataLoader(Numbers(12), batch_size=2, shuffle=True), 0, 1)
    again.load_state_dict(state)
    assert sorted(part + whole([again])) == list(range(12))
    torch.manual_seed(5)
    assert part == [item for batch in DataLoader(Numbers(12), batch_size=2, shuffle=True) for item in values(batch)][:6]


@pytest.mark.parametrize("kind", ["subset", "weighted", "own batch sampler", "replacement"])
@pytest.mark.parametrize("rounds", [2, 99])
def test_samplers_that_draw_from_the_global_generator_go_on(kind: str, rounds: int) -> None:
    def made() -> list[PreparedDataLoader]:
        data = Numbers(12)
        batch_sampler = OddBatches(RandomSampler(data), 2, False)
        samplers: dict[str, dict[str, Any]] = {
            "subset": {"sampler": SubsetRandomSampler(range(12)), "batch_size": 2},
            "weighted": {"sampler": WeightedRandomSampler([1.0] * 12, 12, replacement=False), "batch_size": 2},
            "own batch sampler": {"batch_sampler": batch_sampler},
            "replacement": {"sampler": RandomSampler(data, replacement=True), "batch_size": 2},
        }
        return [prepare(DataLoader(data, **samplers[kind]), 0, 1)]

    torch.manual_seed(5)
    first = made()
    part, [state] = walk(first, rounds)
    torch.manual_seed(5)
    expected = whole(made())
    torch.manual_seed(99)
    drawn = torch.rand(1)
    torch.manual_seed(99)
    again = made()
    again[0].load_state_dict(state)
    assert torch.rand(1) == drawn  # nothing is drawn while loading
    torch.manual_seed(99)
    if rounds == 2:
        assert part + whole(again) == expected
    else:
        assert part == expected
        assert len(whole(again)) == 12


def test_another_epoch_is_not_begun_in_the_middle() -> None:
    state = walk(ranks_of("seeded", 20, 2, 1), 3)[1][0]
    loader = ranks_of("seeded", 20, 2, 1)[0]
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert len(list(loader)) == 7
    loader.load_state_dict(state)
    loader.set_epoch(4)
    assert len(list(loader)) == 10


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_go_on_where_each_worker_was(workers: int) -> None:
    def made(world_size: int) -> list[PreparedDataLoader]:
        return [
            prepare(DataLoader(Stream(13), batch_size=2, num_workers=workers), rank, world_size)
            for rank in range(world_size)
        ]

    expected = sorted(whole(made(1)))
    for before, after in ((1, 2), (2, 1), (2, 2), (2, 3)):
        part, states = walk(made(before), 2)
        loaders = made(after)
        for loader in loaders:
            loader.load_state_dict(states[0])
        assert sorted(part + whole(loaders)) == expected, (before, after)


def test_another_number_of_workers_is_refused_for_a_stream() -> None:
    loader = prepare(DataLoader(Stream(13), batch_size=2, num_workers=2), 0, 1)
    state = walk([loader], 2)[1][0]
    with pytest.raises(DataError, match="taken with 2 worker"):
        prepare(DataLoader(Stream(13), batch_size=2), 0, 1).load_state_dict(state)


def test_other_data_is_refused_in_the_middle_of_an_epoch() -> None:
    loaders = ranks_of("plain", 20, 2, 1)
    state = walk(loaders, 3)[1][0]
    other = ranks_of("plain", 21, 2, 1)[0]
    with pytest.raises(DataError, match="epoch of 20 samples; this data set has 21"):
        other.load_state_dict(state)
    with pytest.raises(DataError, match="no state of a prepared loader"):
        other.load_state_dict({"anything": 1})
    whole(loaders)
    other.load_state_dict(loaders[0].state_dict())  # between epochs it does not matter


# --- skipping ----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 24),
    batch_size=st.integers(1, 4),
    world_size=st.integers(1, 4),
    first=st.integers(0, 5),
    more=st.integers(0, 3),
)
def test_skipping_leaves_out_the_first_batches(
    kind: str, count: int, batch_size: int, world_size: int, first: int, more: int
) -> None:
    for loader in ranks_of(kind, count, batch_size, world_size):
        twin = loader.skipping(first).skipping(more)
        rest = [values(batch) for batch in twin]
        if kind != "stream":
            assert len(twin) == len(rest)
        again = ranks_of(kind, count, batch_size, world_size)[loader._group.rank]
        everything = [values(batch) for batch in again]
        assert rest == everything[first + more :]
        assert [values(batch) for batch in loader] == [values(batch) for batch in again]


@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_skipping_batches_of_workers_leaves_the_others_in_their_order(skipped: int) -> None:
    loader = prepare(DataLoader(Stream(7), batch_size=2, num_workers=2), 0, 1)
    everything = [values(batch) for batch in loader]
    found = []
    for batch in loader.skipping(skipped):
        found.append(values(batch))
        state = loader.state_dict()
    assert found == everything[skipped:]
    assert state["places"] == [7, 7]


def test_the_loader_that_skips_and_its_origin_count_epochs_together() -> None:
    [loader] = ranks_of("seeded", 10, 2, 1)
    list(loader.skipping(2))
    assert loader.iteration == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skipped", [0, 2, 3, 4])
def test_skipping_on_a_restored_loader_counts_from_the_start_of_the_epoch(
    kind: str, skipped: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    undisturbed = ranks_of(kind, 20, 2, 2)[1]
    epoch, next_epoch = ([values(batch) for batch in undisturbed] for _ in range(2))
    state = walk(ranks_of(kind, 20, 2, 2), 3)[1][1]
    loader = ranks_of(kind, 20, 2, 2)[1]
    loader.load_state_dict(state)
    short = loader.skipping(skipped)
    assert [values(batch) for batch in short] == epoch[skipped:]
    assert loader.iteration == 1
    assert [values(batch) for batch in loader] == next_epoch
    assert caplog.text.count("from the start of the epoch") == (skipped != 3)


def test_the_place_of_a_loader_that_skips_is_its_origins() -> None:
    """Scripts save the loader that they have prepared, while they iterate the one that skips."""
    loader = ranks_of("shuffled", 20, 2, 1)[0]
    rest = []
    for number, batch in enumerate(loader.skipping(2)):
        if number:
            rest += values(batch)
        else:
            state = loader.state_dict()
    again = ranks_of("shuffled", 20, 2, 1)
    again[0].load_state_dict(state)
    assert whole(again) == rest


def test_another_world_size_says_how_many_batches_were_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    state = walk(ranks_of("plain", 20, 2, 2), 3)[1][0]
    loader = ranks_of("plain", 20, 2, 1)[0]
    loader.load_state_dict(state)
    loader.skipping(3)
    assert "3 batches are skipped from the start of the epoch; the state that was loaded is from after 6" in caplog.text


def test_bad_numbers_to_skip() -> None:
    loader = DataLoader(Numbers(4))
    for wrong in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="num_batches"):
            skip_first_batches(loader, wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs a DataLoader"):
        skip_first_batches([1, 2], 1)  # type: ignore[arg-type]
    assert list(skip_first_batches(loader, 9)) == []


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 40), seed=st.integers(0, 1000), broken_off=st.booleans())
def test_the_order_and_the_draws_are_those_of_torch(count: int, seed: int, broken_off: bool) -> None:
    """In drop-in mode the order is torch's own, epoch after epoch."""
    torchs = RandomSampler(range(count), generator=torch.Generator().manual_seed(seed))
    ours = RandomSampler(range(count), generator=torch.Generator().manual_seed(seed))
    loader = prepare(DataLoader(Numbers(count), batch_size=3, sampler=ours), 0, 1)
    plain = DataLoader(Numbers(count), batch_size=3, sampler=torchs)
    for _ in range(3):
        if broken_off and count > 6:  # we read one batch ahead, and the end of the order draws once more
            next(iter(plain)), next(iter(loader))
        assert [values(batch) for batch in loader] == [values(batch) for batch in plain]
        assert torch.equal(ours.generator.get_state(), torchs.generator.get_state())
