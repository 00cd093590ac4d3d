"""gather_for_metrics between real ranks: exact in every kind of round, and nobody waits for a rank without a batch."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lockstep.comm import objects, tensors
from lockstep.comm.agree import agree
from lockstep.data import metrics
from lockstep.data.global_batch import GlobalBatch
from lockstep.errors import DistributedOperationException, PeerFailure, UsageError
from lockstep.testing import run_ranks
from tests.ranks import join

ROUNDS = {
    "complete": ((3, 3), (3, 3)),
    "last": ((4, 4), (4, 1)),
    "half of each": ((4, 4), (2, 2)),
    "only repeats on one rank": ((4, 4), (4, 0)),
    "uneven": ((3, 1), (3, 1)),
    "uneven with repeats": ((2, 5), (2, 3)),
    "three": ((4, 4, 4), (4, 3, 0)),
    "three uneven": ((1, 4, 2), (1, 4, 1)),
    "last rank is idle": ((3, 3, 0), (3, 3, 0)),
    "first rank is idle": ((0, 2, 3), (0, 2, 3)),
    "idle with repeats": ((3, 0, 3), (3, 0, 1)),
    "one is left": ((0, 0, 3), (0, 0, 2)),
    "four, two idle": ((3, 0, 2, 0), (3, 0, 1, 0)),
}
DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64)


class Pair(NamedTuple):
    first: Any
    second: Any


def a_round(name: str) -> GlobalBatch:
    rows, real = ROUNDS[name]
    return GlobalBatch(start=0, rows=rows, real=real)


def silent(_: str) -> None:
    """For announcements that are not looked at."""


def numbers(rank: int, samples: int, per_sample: int = 1) -> list[int]:
    """One number for each item of the first samples of a rank, unlike all others of the job."""
    return [1000 * rank + 10 * sample + item for sample in range(samples) for item in range(per_sample)]


def wanted(now: GlobalBatch, per_sample: int = 1) -> list[int]:
    return [number for rank, real in enumerate(now.real) for number in numbers(rank, real, per_sample)]


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(found, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
    elif isinstance(found, dict):
        assert list(found) == list(expected)
        for key in found:
            same(found[key], expected[key])
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


# --- every kind of round -----------------------------------------------------------------------------------------


def tensor_tree(items: Any) -> dict[str, Any]:
    """Made from the items of one rank, or of the expected whole."""
    one, three = torch.tensor(items(1)), torch.tensor(items(3))
    return {
        "rows": one,
        "three per sample": [three, three.view(-1, 1).repeat(1, 2).t().contiguous().t()],
        "dtypes": tuple((one % 2).to(dtype) for dtype in DTYPES),
        "nothing": (torch.zeros(len(one), 0), torch.zeros(0, 4, dtype=torch.bfloat16)),
    }


def exact_tensors(name: str) -> str:
    group, now = join(), a_round(name)
    if not now.rows[group.rank]:
        return "idle"
    complaints: list[str] = []
    kept = []
    mine = tensor_tree(lambda multiple: numbers(group.rank, now.rows[group.rank], multiple))
    expected = tensor_tree(lambda multiple: wanted(now, multiple))
    for _ in range(3):
        found = metrics.gather(group, mine, now, announce=complaints.append)
        same(found, expected)
        kept.append(found)
        kept.append(metrics.gather(group, tensor_tree(lambda m: [0] * len(mine["rows"]) * m), now, announce=print))
        same(metrics.gather(group, mine["rows"], now), expected["rows"])
        tracked = mine["rows"].float().requires_grad_()
        assert not metrics.gather(group, tracked, now).requires_grad
        with torch.inference_mode():
            same(metrics.gather(group, {"a": mine["rows"]}, now), {"a": expected["rows"]})
    for found in kept[::2]:  # none of the later calls has written into an earlier result
        same(found, expected)
    assert complaints == []
    return "took part"


@pytest.mark.parametrize("name", ROUNDS)
def test_tensors(name: str) -> None:
    rows, _ = ROUNDS[name]
    assert run_ranks(exact_tensors, len(rows), name) == ["took part" if count else "idle" for count in rows]


def exact_objects(name: str, debug: bool) -> str:
    group, now = join(debug), a_round(name)
    if not now.rows[group.rank]:
        return "idle"
    complaints: list[str] = []

    def tree(items: Any, sequence: Any) -> dict[str, Any]:
        one, two = items(1), items(2)
        return {
            "texts": [f"text {number}" for number in one],
            "long": ["x" * 3000 + str(number) for number in one],
            "tuple": sequence(str(number) for number in two),
            "pair": Pair([{"id": number, "box": torch.tensor([number])} for number in one], torch.tensor(two)),
            "both": ([str(number) for number in one], [[number] * 2 for number in two]),
            "with tensors": [torch.tensor(one).bfloat16(), [None for _ in one]],
        }

    def gather(data: Any, **options: Any) -> Any:
        return metrics.gather(group, data, now, announce=complaints.append, **options)

    own = now.rows[group.rank]
    mine, expected = tree(lambda m: numbers(group.rank, own, m), tuple), tree(lambda m: wanted(now, m), list)
    for _ in range(2):
        same(gather(mine), expected)
    same(gather(mine["texts"]), expected["texts"])
    rows = list(torch.tensor(numbers(group.rank, own)))
    same(gather(rows, as_objects=True), list(torch.tensor(wanted(now))))
    same(gather({"a": rows}, as_objects=True), {"a": list(torch.tensor(wanted(now)))})
    same(gather(torch.tensor(numbers(group.rank, own)), as_objects=True), torch.tensor(wanted(now)))
    same(gather(f"{number}" for number in numbers(group.rank, own)), [f"{number}" for number in wanted(now)])
    with pytest.raises(TypeError, match=r"it got a str. Put it into a list: gather_for_metrics\(\[value\]\)"):
        gather("text")
    assert complaints == []
    return "took part"


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", ROUNDS)
def test_objects(name: str, debug: bool) -> None:
    rows, _ = ROUNDS[name]
    assert run_ranks(exact_objects, len(rows), name, debug) == ["took part" if count else "idle" for count in rows]


def outside_of_a_loader() -> None:
    group = join()
    same(metrics.gather(group, torch.tensor([group.rank]), None), torch.arange(2))
    same(metrics.gather(group, {"a": torch.tensor(group.rank)}, None), {"a": torch.arange(2)})
    same(metrics.gather(group, [str(group.rank)], None), ["0", "1"])
    same(metrics.gather(group, {"a": [group.rank], "b": 0.5}, None), {"a": [0, 1], "b": [0.5, 0.5]})
    same(metrics.gather(group, ["only here"] if group.rank else [], None), ["only here"])


def test_without_a_round_nothing_is_dropped() -> None:
    run_ranks(outside_of_a_loader, 2)


def alone() -> None:
    group = join()
    for data in (torch.ones(3), {"a": ["x"]}, "text", ["x"]):
        for as_objects in (False, True):
            assert metrics.gather(group, data, GlobalBatch(0, (3,), (3,)), as_objects=as_objects) is data


def test_one_process_gets_what_it_gave() -> None:
    run_ranks(alone, 1)


# --- what it costs -----------------------------------------------------------------------------------------------


def collectives_used() -> dict[str, int]:
    group = join()
    own = {"a": torch.ones(4), "b": (torch.ones(8, dtype=torch.bfloat16), torch.zeros(()))}
    uneven = GlobalBatch(0, (4, 2), (4, 2))
    rows = uneven.rows[group.rank]
    calls = {
        "complete": lambda: metrics.gather(group, own, GlobalBatch(0, (4, 4), (4, 4))),
        "complete, one tensor": lambda: metrics.gather(group, own["a"], GlobalBatch(0, (4, 4), (4, 4))),
        "no round": lambda: metrics.gather(group, own, None),
        "repeats": lambda: metrics.gather(group, own, GlobalBatch(0, (4, 4), (4, 1)), announce=silent),
        "objects": lambda: metrics.gather(group, {"a": ["x"] * 4, "b": own["a"]}, GlobalBatch(0, (4, 4), (4, 1))),
        "uneven": lambda: metrics.gather(group, [torch.ones(rows, 3), torch.ones(2 * rows)], uneven),
    }
    used = {}
    for name, call in calls.items():
        for _ in range(2):
            before = group.pg._get_sequence_number_for_group()
            call()
            counted = group.pg._get_sequence_number_for_group() - before
            assert used.setdefault(name, counted) == counted
    return used


def test_everything_travels_in_one_collective_unless_sizes_differ() -> None:
    for used in run_ranks(collectives_used, 2):
        assert used.pop("uneven") == 2
        assert used == dict.fromkeys(used, 1)
        assert len(used) == 5


def nothing_to_cut() -> None:
    group = join()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "Joiner", None)
        for now in (None, GlobalBatch(0, (2, 2), (2, 2))):
            same(metrics.gather(group, {"a": torch.tensor([group.rank] * 2)}, now), {"a": torch.tensor([0, 0, 1, 1])})
            same(metrics.gather(group, torch.tensor([group.rank] * 2), now), torch.tensor([0, 0, 1, 1]))


def test_a_complete_round_takes_the_plain_gather() -> None:
    run_ranks(nothing_to_cut, 2)


# --- ranks without a batch ---------------------------------------------------------------------------------------


def end_of_an_epoch(seconds: float) -> float:
    """Rank 2 has left the loop and does something else for a while; then all go on together."""
    group = join()
    started = time.monotonic()
    if group.rank == 2:
        time.sleep(seconds)
    else:
        for number in range(5):
            now = GlobalBatch(2 * number, (1, 1, 0), (1, 1, 0))
            same(metrics.gather(group, torch.tensor([group.rank]), now), torch.tensor([0, 1]))
            same(metrics.gather(group, [f"rank {group.rank}"], now), ["rank 0", "rank 1"])
            large = torch.full((1, 300_000), float(group.rank))
            assert metrics.gather(group, large, now)[:, 7].tolist() == [0.0, 1.0]
    took = time.monotonic() - started
    same(tensors.gather(group, torch.tensor([group.rank])), torch.tensor([0, 1, 2]))
    return took


def test_nobody_waits_for_a_rank_whose_loop_is_over() -> None:
    first, second, idle = run_ranks(end_of_an_epoch, 3, 3.0)
    assert max(first, second) < 2.0
    assert idle >= 3.0


def comes_late() -> None:
    group = join()
    now = GlobalBatch(0, (1, 1, 0), (1, 1, 0))
    for late in (0, 1):
        if group.rank == late:
            time.sleep(0.7)  # longer than a slice of the waits for collectives
        if group.rank != 2:
            same(metrics.gather(group, torch.tensor([group.rank]), now), torch.tensor([0, 1]))
    same(tensors.gather(group, torch.tensor([group.rank])), torch.tensor([0, 1, 2]))


def test_a_peer_that_comes_late_is_waited_for() -> None:
    run_ranks(comes_late, 3)


def called_without_a_batch() -> str:
    group, now = join(), GlobalBatch(0, (2, 0), (2, 0))
    if group.rank == 0:  # alone in this round, and done at once
        same(metrics.gather(group, torch.ones(2), now), torch.ones(2))
        return ""
    with pytest.raises(UsageError, match=r"rank 1, which has no batch .*\(2, 0\)") as caught:
        metrics.gather(group, torch.ones(2), now)
    return str(caught.value)


def test_a_rank_without_a_batch_that_calls_is_told() -> None:
    assert "inside the loop" in run_ranks(called_without_a_batch, 2)[1]


def fails_meanwhile(as_objects: bool) -> tuple[str, float, list[int]]:
    group = join()
    now = GlobalBatch(0, (2, 2, 0), (2, 2, 0))
    data: Any = ["a", "b"] if as_objects else torch.ones(2)

    def step() -> str:
        if group.rank == 1:
            time.sleep(0.5)
            raise ValueError("rank 1 cannot go on")
        if group.rank == 0:
            try:
                metrics.gather(group, data, now)
            except PeerFailure as error:
                seen.append(str(error))
                raise
        return "done"

    seen: list[str] = []
    started = time.monotonic()
    agreement = agree(group, step)
    took = time.monotonic() - started
    assert [failure.rank for failure in agreement.failures] == [1]
    # The next generation's connections are whole, between all of them.
    if group.rank != 2:
        same(metrics.gather(group, torch.tensor([group.rank] * 2), now), torch.tensor([0, 0, 1, 1]))
    return "".join(seen), took, tensors.gather(group, torch.tensor([group.rank])).tolist()


@pytest.mark.parametrize("as_objects", [False, True])
def test_a_failing_peer_frees_who_waits_for_its_message(as_objects: bool) -> None:
    results = run_ranks(fails_meanwhile, 3, as_objects)
    assert "Rank 1 failed: ValueError: rank 1 cannot go on. While gathering for metrics" in results[0][0]
    for _, took, everyone in results:
        assert took < 5.0
        assert everyone == [0, 1, 2]


def messages_of_the_user() -> None:
    """Messages with other tags are under way meanwhile, and each gets to where it belongs."""
    group = join()
    if group.rank == 2:
        return
    other = 1 - group.rank
    theirs = torch.zeros(1, dtype=torch.int64)
    sent = group.pg.send([torch.tensor([7 + group.rank])], other, 0)
    assert objects.objects_among(group, [0, 1], group.rank) == [0, 1]  # theirs has been under way before ours
    group.pg.recv([theirs], other, 0).wait()
    sent.wait()
    assert theirs.tolist() == [7 + other]


def test_messages_of_the_user_do_not_mix_with_ours() -> None:
    run_ranks(messages_of_the_user, 3)


# --- what cannot be told -----------------------------------------------------------------------------------------

PROBLEMS = {
    "scalar": (
        "last",
        lambda rows: {"loss": torch.tensor(0.5)},
        ["one value per rank at ['loss']", "[4, 4]", "[4, 1]"],
    ),
    "number": ("last", lambda rows: {"loss": 0.5, "texts": ["x"] * rows}, ["one value per rank at ['loss']"]),
    "scalar, uneven": ("uneven", lambda rows: torch.tensor(0.5), ["[3, 1] samples, of which [3, 1]", "reduction="]),
    "scalar, idle": ("idle with repeats", lambda rows: torch.tensor(0.5), ["[3, 3] samples, of which [3, 1]"]),
    "scalar, alone": ("one is left", lambda rows: torch.tensor(0.5), ["[3] samples, of which [2]"]),
    "rows": ("last", lambda rows: [torch.ones(10, 2)], ["[10, 10] rows at [0]", "[4, 4] samples", "3 repeated"]),
    "rows, uneven": ("uneven with repeats", lambda rows: torch.ones(10, 2), ["[10, 10] rows from", "[2, 5] samples"]),
    "rows, idle": ("idle with repeats", lambda rows: torch.ones(4), ["[4, 4] rows", "[3, 3] samples"]),
    "objects": ("last", lambda rows: ["x"] * 7, ["[7, 7] objects", "[4, 4] samples", "Pass objects per sample"]),
}


def trouble(case: str, debug: bool) -> tuple[list[str], list[str], Any]:
    group = join(debug)
    name, make, _ = PROBLEMS[case]
    now = a_round(name)
    if not now.rows[group.rank]:
        return [], [], None
    metrics._REPORTED.clear()
    said: list[str] = []
    errors: list[str] = []
    found: Any = None
    for _ in range(3):
        try:
            found = metrics.gather(group, make(now.rows[group.rank]), now, announce=said.append)
        except UsageError as error:
            errors.append(str(error))
    return said, errors, found


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_warning_once(case: str) -> None:
    name, make, texts = PROBLEMS[case]
    rows, real = ROUNDS[name]
    taking_part = [rank for rank, count in enumerate(rows) if count]
    results = run_ranks(trouble, len(rows), case, False)
    (line,) = results[taking_part[0]][0]
    assert all(text in line for text in texts)
    for rank in taking_part:
        said, errors, found = results[rank]
        assert errors == []
        assert len(said) == (rank == taking_part[0])
        if "scalar" in case or case == "number":
            loss = found["loss"] if isinstance(found, dict) else found
            assert list(loss) == [0.5] * sum(count > 0 for count in real)
        else:  # nothing is dropped
            whole = found[0] if case == "rows" else found
            assert len(whole) == sum(len(make(4)[0] if case == "rows" else make(4)) for _ in taking_part)


@pytest.mark.parametrize("case", PROBLEMS)
def test_an_error_on_every_rank_in_debug_mode(case: str) -> None:
    name, _, texts = PROBLEMS[case]
    rows, _ = ROUNDS[name]
    found = set()
    for count, (said, errors, _) in zip(rows, run_ranks(trouble, len(rows), case, True), strict=True):
        assert said == []
        assert len(errors) == (3 if count else 0)
        found.update(errors)
    (text,) = found
    assert all(part in text for part in texts)


def no_trouble(name: str) -> tuple[list[str], Any]:
    group, now = join(debug=True), a_round(name)
    said: list[str] = []
    if not now.rows[group.rank]:
        return said, None
    return said, metrics.gather(group, torch.tensor(float(group.rank)), now, announce=said.append).tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("complete", [0, 1]), ("only repeats on one rank", [0]), ("last rank is idle", [0, 1])],
)
def test_one_value_per_rank_where_its_mean_is_right(name: str, expected: list[float]) -> None:
    rows, _ = ROUNDS[name]
    for count, result in zip(rows, run_ranks(no_trouble, len(rows), name), strict=True):
        assert result == ([], expected if count else None)


def mismatch(case: str) -> str:
    debug = case.startswith("debug")
    group = join(debug)
    odd = group.rank == 1
    uneven, idle = GlobalBatch(0, (2, 3), (2, 3)), GlobalBatch(0, (2, 2, 0), (2, 2, 0))
    repeats = GlobalBatch(0, (2, 2), (2, 1))
    rows = uneven.rows[group.rank] if group.rank < 2 else 0
    calls = {
        "debug, repeats": lambda: metrics.gather(group, torch.ones(2, 4 if odd else 5), repeats),
        "debug, uneven": lambda: metrics.gather(group, torch.ones(rows, 4 if odd else 5), uneven),
        "debug, object and tensor": lambda: metrics.gather(group, ["a"] * 2 if odd else torch.ones(2), repeats),
        "dimension": lambda: metrics.gather(group, torch.ones(()) if odd else torch.ones(rows), uneven),
        "objects": lambda: metrics.gather(group, {"b" if odd else "a": ["x"] * 2}, repeats),
        "idle, shapes": lambda: metrics.gather(group, torch.ones(2, 4 if odd else 5), idle),
        "idle, leaves": lambda: metrics.gather(group, [torch.ones(2)] * (2 if odd else 1), idle),
    }
    if group.rank == 2:
        return ""
    with pytest.raises(DistributedOperationException) as caught:
        calls[case]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("debug, repeats", "Process 1: [2, 4]"),
        ("debug, uneven", "Process 1: [3, 4]"),
        ("debug, object and tensor", "lockstep.gather / lockstep.gather_object"),
        ("dimension", "[[2], [-1]]"),
        ("objects", "dict of ['a']; dict of ['b']"),
        ("idle, shapes", "[2, 5] torch.float32; [2, 4] torch.float32"),
        ("idle, leaves", "1 tensors; 2 tensors"),
    ],
)
def test_what_does_not_fit_is_the_same_error_on_all_ranks(case: str, expected: str) -> None:
    first, second = run_ranks(mismatch, 3 if "idle" in case else 2, case)[:2]
    assert first == second
    assert expected in first
