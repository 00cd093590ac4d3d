import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.traces.align import keyed, merged, merged_order
from lockstep.traces.diff import diff_batches, diff_runs, unlike
from lockstep.traces.tolerance import BY_DTYPE
from tests.unit.numerics.making import FRAMES, call, changed, small_run, stat


class Listed:
    """A trace that is a list of frames."""

    def __init__(self, frames, complete=True):
        self.frames = frames
        self.complete = complete

    def batches(self):
        for batch, frames in itertools.groupby(self.frames, key=lambda frame: frame.batch):
            yield batch, list(frames)


def diff(first, second, **options):
    return diff_runs({0: Listed(first)}, {0: Listed(second)}, **options)


def place(found):
    return found.batch, found.module, found.tensor, found.what


@given(frames=FRAMES)
@settings(deadline=None, max_examples=40)
def test_a_trace_does_not_differ_from_itself(frames):
    for together in (False, True):
        found = diff(frames, frames, together=together)
        assert not found.parted
        assert found.notes == []
    assert found.batches == sorted({frame.batch for frame in frames})


@given(
    batches=st.integers(1, 4),
    modules=st.integers(1, 6),
    at=st.data(),
    change=st.sampled_from(
        [
            ({"abs_max": 100.0}, "abs max"),
            ({"abs_max": 0.5}, "abs max"),
            ({"abs_min": 0.3}, "abs min"),
            ({"nans": True, "abs_max": math.nan}, "nan"),
            ({"infs": True, "abs_max": math.inf}, "inf"),
            ({"shape": (4, 9)}, "shape"),
            ({"note": "None"}, "note"),
        ]
    ),
)
@settings(deadline=None)
def test_a_planted_difference_is_found_at_its_place(batches, modules, at, change):
    frames = small_run(batches, modules)
    index = at.draw(st.integers(0, len(frames) - 1))
    number = at.draw(st.integers(0, 2))
    values, what = change
    later = changed(frames, index, number, **values)
    frame = frames[index]
    for first, second in ((frames, later), (later, frames)):
        found = diff(first, second)
        assert [place(one) for one in found.differences] == [
            (frame.batch, frame.module, frame.stats[number].name, what)
        ]
        assert found.batches[-1] == frame.batch


@given(at=st.integers(0, 11), ranks=st.integers(2, 4), data=st.data())
@settings(deadline=None, max_examples=30)
def test_the_rank_is_named(at, ranks, data):
    rank = data.draw(st.integers(0, ranks - 1))
    frames = small_run()
    first = {number: Listed(frames) for number in range(ranks)}
    second = {**first, rank: Listed(changed(frames, at, 2, abs_max=77.0))}
    (found,) = diff_runs(first, second).differences
    assert (found.rank, found.batch, found.module) == (rank, frames[at].batch, frames[at].module)


def test_the_first_batch_that_differs_ends_the_comparison():
    frames = small_run(batches=5)
    later = changed(changed(frames, 9, 2, abs_max=50.0), 17, 2, abs_max=50.0)
    found = diff(frames, later)
    assert found.batches == [0, 1, 2]
    assert [one.batch for one in found.differences] == [2]


# ---------------------------------------------------------------- modules that only one side has


@given(gone=st.sets(st.integers(0, 5), min_size=1, max_size=5))
@settings(deadline=None)
def test_missing_and_extra_modules_are_named_and_the_rest_is_compared(gone):
    frames = small_run(batches=2, modules=6)
    fewer = [frame for frame in frames if int(frame.module[-1]) not in gone]
    names = [f"layer.{module} (Linear)" for module in sorted(gone)]
    found = diff(frames, fewer)
    assert sorted(found.missing) == names
    assert found.extra == {}
    assert found.parted
    found = diff(fewer, frames)
    assert (sorted(found.extra), found.missing) == (names, {})
    assert found.tensors == 3 * len(fewer)
    assert set(found.extra.values()) == {"batch 0, forward, rank 0"}


def test_a_missing_tensor_is_named_with_its_module():
    frames = small_run(1)
    fewer = [replace(frames[0], stats=frames[0].stats[1:]), *frames[1:]]
    assert list(diff(frames, fewer).missing) == ["layer.0 (Linear), weight"]


def test_what_a_cut_trace_did_not_come_to_is_no_missing_module():
    frames = small_run(batches=2)
    cut = Listed(frames[:6], complete=False)
    for first, second, side in ((Listed(frames), cut, "second"), (cut, Listed(frames), "first")):
        found = diff_runs({0: first}, {0: second})
        assert not found.parted
        assert found.notes == [f"The {side} ends within batch 1: 2 calls of the other have no counterpart."]
    assert diff(frames, frames[:6]).missing  # closed, and so without them


def test_batches_of_one_side_only_are_said():
    found = diff([frame for frame in small_run(6) if frame.batch != 1], small_run(4))
    assert found.batches == [0, 2, 3]
    assert found.notes == ["Only the first has batches 4-5.", "Only the second has batch 1."]
    assert not found.parted


def test_another_order_of_execution_is_said():
    frames = small_run(1)
    found = diff(frames, [frames[0], frames[2], frames[1], frames[3]])
    assert found.differences == []
    assert found.notes == ["The modules run in another order from layer.1 (Linear) on (batch 0, forward)."]


@given(
    st.lists(st.permutations(range(8)).flatmap(lambda order: st.integers(0, 8).map(lambda n: order[:n])), max_size=4)
)
def test_one_order_holds_all_and_keeps_the_first(orders):
    whole = merged_order(orders)
    assert sorted(whole) == sorted({item for order in orders for item in order})
    if orders:
        assert [item for item in whole if item in orders[0]] == orders[0]


def test_what_is_new_stands_behind_what_came_before_it():
    assert merged_order([["a", "b", "c"], ["x", "a", "y", "z", "c"]]) == ["x", "a", "y", "z", "b", "c"]
    assert merged_order([["a", "b"], ["x", "y"]]) == ["a", "b", "x", "y"]


def test_calls_of_one_module_are_told_apart():
    first = [call(0, "shared", stat(high=number + 1.0), number=number) for number in range(3)]
    (found,) = diff(first, changed(first, 1, 0, abs_max=9.0)).differences
    assert found.call == 1
    again = [call(0, "shared"), call(0, "shared")]
    assert len(keyed(again)) == 2


# ---------------------------------------------------------------- tolerance


def test_the_tolerance_is_that_of_the_coarser_dtype():
    def parts(dtype, other, share):
        first = [call(0, "a", stat("output", dtype, high=1.0))]
        second = [call(0, "a", stat("output", other, high=1.0 - share))]
        return diff(first, second).parted

    for dtype in BY_DTYPE:
        assert not parts(dtype, dtype, BY_DTYPE[dtype] * 0.9)
        assert parts(dtype, dtype, BY_DTYPE[dtype] * 1.1 + 1e-8)
    assert not parts("float32", "bfloat16", 0.05)
    assert parts("float32", "float16", 0.05)
    assert parts("int64", "int64", 1e-6)
    assert not diff([call(0, "a", stat(high=1.0))], [call(0, "a", stat(high=1.4))], rtol=0.5).parted


def test_a_rounding_travels_on_but_not_into_parameters_of_its_own_batch():
    def run(batch, dtype, grown):
        return [
            call(batch, "a", stat("input[0]"), stat("output", dtype)),
            call(batch, "b", stat("weight", high=1.0 + grown), stat("output", high=1.0 + grown)),
        ]

    def found(batch, grown):
        return [one.tensor for one in diff(run(batch, "float32", 0.0), run(batch, "bfloat16", grown)).differences]

    assert found(0, 0.03) == ["weight"]  # no step has been made: it must be the same
    assert found(7, 0.03) == []  # seven steps in bf16 have
    assert found(7, 0.1) == ["output"]  # these add up
    assert found(7, 0.3) == ["weight", "output"]
    two = [*run(0, "bfloat16", 0.0), *run(1, "bfloat16", 0.03)]
    assert not diff([*run(0, "float32", 0.0), *run(1, "float32", 0.0)], two).parted


def test_gradients_are_given_more_room():
    def parts(phase):
        first = [call(0, "a", stat("x", "bfloat16", high=1.0), phase=phase)]
        return diff(first, changed(first, 0, 0, abs_max=1.1)).parted

    assert parts("forward")
    assert not parts("backward")
    assert not parts("optimizer")


def test_gradients_of_one_module_come_in_any_order():
    parts = [call(0, "a", stat(f"{name}.grad", high=high), phase="backward") for name, high in (("w", 1.0), ("b", 2.0))]
    found = diff([call(0, "a", stat("grad_output[0]"), phase="backward"), *parts], [parts[1], parts[0]])
    assert found.differences == []
    assert list(found.missing) == ["a (Linear), grad_output[0]"]


def test_a_smallest_value_is_measured_by_the_largest():
    assert unlike(stat(low=1e-9, high=1.0), stat(low=3e-6, high=1.0), 1e-5) is None
    assert unlike(stat(low=1e-3, high=1.0), stat(low=3e-3, high=1.0), 1e-5) == ("abs min", pytest.approx(2e-3))
    assert unlike(stat(low=0.0, high=1.0), stat(low=0.5, high=1.0), 1e-2) is None


def test_remains_of_zero_are_alike():
    assert unlike(stat(low=0.0, high=0.0), stat(low=0.0, high=5e-9), 1e-5) is None
    assert unlike(stat(low=0.0, high=0.0), stat(low=0.0, high=5e-9), 1e-5, 0.0) is not None


def test_the_share_that_underflowed_counts_within_one_dtype():
    first, second = stat(dtype="float16", tiny=0.0), stat(dtype="float16", tiny=0.4)
    assert unlike(first, second, 1e-2) == ("underflow", 0.4)
    assert unlike(first, replace(second, dtype="float32"), 1e-2) is None
    assert unlike(first, replace(second, tiny=None), 1e-2) is None


def test_nan_on_both_sides_is_no_difference():
    bad = stat(high=math.nan, low=math.nan, nans=True)
    assert unlike(bad, bad, 0.0) is None
    assert unlike(stat(high=math.inf, infs=True), stat(high=math.inf, infs=True), 0.0) is None
    assert unlike(stat(high=math.inf), stat(high=1.0), 0.5) == ("abs max", math.inf)


# ---------------------------------------------------------------- several ranks, two batches


@given(
    values=st.lists(st.lists(st.floats(0, 100), min_size=2, max_size=2), min_size=1, max_size=6),
    split=st.integers(1, 6),
)
def test_ranks_taken_together_are_as_one_rank_with_all_samples(values, split):
    parts = [values[i : i + split] for i in range(0, len(values), split)]

    def frame(rows):
        numbers = [number for row in rows for number in row]
        share = sum(number < 1 for number in numbers) / len(numbers)
        return call(0, "a", stat(shape=(len(rows), 2), low=min(numbers), high=max(numbers), tiny=share))

    (one,) = merged([[frame(part)] for part in parts])
    whole = frame(values)
    assert (one.stats[0].abs_min, one.stats[0].abs_max) == (whole.stats[0].abs_min, whole.stats[0].abs_max)
    assert one.stats[0].tiny == pytest.approx(whole.stats[0].tiny)


def test_runs_of_other_world_sizes_are_compared_without_the_backward_pass():
    def run(high, backward, step):
        return [
            call(0, "a", stat(shape=(4, 2), high=high)),
            call(0, "a", stat("grad_output[0]", high=backward), phase="backward"),
            call(0, "a", stat("weight.grad", high=step), phase="optimizer"),
        ]

    alone = {0: Listed(run(2.0, 1.0, 0.5))}
    pair = {0: Listed(run(2.0, 2.0, 0.5)), 1: Listed(run(1.5, 2.0, 0.5))}
    assert not diff_runs(alone, pair, together=True).parted
    pair[1] = Listed(run(1.5, 2.0, 0.7))
    (found,) = diff_runs(alone, pair, together=True).differences
    assert (found.phase, found.tensor, found.rank) == ("optimizer", "weight.grad", None)


def test_of_two_ranks_only_the_parameters_have_to_agree():
    ranks = [
        [call(0, "a", stat("weight"), stat("input[0]", high=rank + 1.0), stat("output", high=rank + 1.0))]
        for rank in (0, 1)
    ]
    assert not diff(*ranks, parameters_only=True).parted
    assert diff(*ranks).parted
    (found,) = diff(ranks[0], changed(ranks[1], 0, 0, abs_max=1.1), parameters_only=True).differences
    assert found.tensor == "weight"


def test_two_batches_differ_where_a_number_doubled():
    frames = [call(batch, "a", stat(shape=(8 - batch, 2), high=1.0 + 0.3 * batch)) for batch in (0, 1)]
    left, right = ({0: [frame]} for frame in frames)
    assert not diff_batches((0, left), (1, right)).parted
    assert diff_batches((0, left), (1, right), rtol=0.1).parted
    assert diff_batches((0, left), (1, {0: [call(1, "a", stat(high=2.1))]})).parted
    (found,) = diff_batches((0, left), (1, {0: [call(1, "a", stat(high=math.inf, infs=True))]})).differences
    assert found.what == "inf"
