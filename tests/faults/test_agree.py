"""One rank fails, nobody is left behind: all leave what they are in, form the group again and train on."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep import Accelerator, current
from lockstep.comm import tensors
from lockstep.comm.agree import Agreement, agree
from lockstep.comm.objects import all_objects
from lockstep.errors import PeerFailure
from lockstep.process_group.group import Group
from lockstep.testing import Outcome, run_ranks
from lockstep.testing.faults import die
from lockstep.topology.topology import Topology
from tests.faults import blocked
from tests.ranks import in_soak, join

ROUNDS = 3
RECOVERY_SECONDS = 3.0


def seen(agreement: Agreement[Any]) -> list[tuple[int, str, str]]:
    return [(failure.rank, failure.kind, failure.message) for failure in agreement.failures]


def total(group: Group) -> int:
    """Called on: all ranks. A collective that only works when all ranks are in step."""
    return int(tensors.reduce(group, torch.tensor(group.rank + 1), "sum"))


# --- peers blocked in something ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, *in_soak(4)])
@pytest.mark.parametrize("scenario", list(blocked.BLOCKED))
def test_all_leave_and_train_on(scenario: str, world_size: int) -> None:
    reports = run_ranks(blocked.rounds, world_size, scenario, ROUNDS)
    assert blocked.problems(reports, ROUNDS) == []


# --- who is named ------------------------------------------------------------------------------------------------


def fail_on(ranks: list[int]) -> tuple[list[tuple[int, str, str]], str | None, int, str]:
    group = join()
    group.barrier()

    def step() -> None:
        if group.rank in ranks:
            raise KeyError(f"of {group.rank}")
        group.barrier()

    agreement = agree(group, step)
    try:
        agreement.unwrap()
    except (KeyError, PeerFailure) as error:
        raised = f"{type(error).__name__} {error}"
    else:
        raised = ""
    return seen(agreement), agreement.failures[0].details, total(group), raised


@pytest.mark.parametrize(("world_size", "ranks"), [(2, [0, 1]), (4, [1, 3]), (4, [0, 1, 2, 3]), (4, [0])])
def test_every_rank_learns_of_all_that_failed(world_size: int, ranks: list[int]) -> None:
    results = run_ranks(fail_on, world_size, ranks)
    for rank, (failures, details, together, raised) in enumerate(results):
        # A rank that the first failure freed before it could fail itself is no failure, so one is enough.
        assert {failure[0] for failure in failures} <= set(ranks)
        assert failures == results[0][0]
        assert [failure[1:] for failure in failures] == [("KeyError", f"'of {failure[0]}'") for failure in failures]
        assert details is not None
        assert 'raise KeyError(f"of {group.rank}")' in details
        assert together == sum(range(1, world_size + 1))
        if rank in [failure[0] for failure in failures]:
            assert raised == f"KeyError 'of {rank}'"
        else:
            assert raised.startswith("PeerFailure The step failed on another rank (rank ")
            assert "KeyError: 'of " in raised


def fail_together(rounds: int) -> list[list[int]]:
    """All raise at one moment of the machine's clock, when all are in the step."""
    group = join()
    named = []
    for _ in range(rounds):
        moment = max(all_objects(group, time.monotonic())) + 0.1

        def step(moment: float = moment) -> None:
            while time.monotonic() < moment:
                pass
            raise ValueError(group.rank)

        named.append([failure.rank for failure in agree(group, step).failures])
        total(group)
    return named


def test_ranks_that_fail_at_once_are_all_named() -> None:
    assert run_ranks(fail_together, 2, 5) == [[[0, 1]] * 5] * 2


def values() -> list[Any]:
    group = join()
    before = group.generation
    agreement = agree(group, lambda: group.rank * 10)
    nothing = agree(group, lambda: None)
    return [agreement.ok, agreement.unwrap(), nothing.ok, nothing.unwrap(), group.generation - before]


def test_a_step_that_succeeds_gives_each_rank_its_value() -> None:
    assert run_ranks(values, 2) == [[True, 0, True, None, 0], [True, 10, True, None, 0]]


# --- one failure after another -----------------------------------------------------------------------------------


def fail_at_once_after(rounds: int) -> list[Any]:
    """Rank 1 fails the moment it has left a scope; rank 0 may still be in that scope's last barrier."""
    group = join()
    seen_here = []

    def fail() -> None:
        if group.rank == 1:
            raise ValueError("at once")
        total(group)

    for number in range(rounds):
        good = agree(group, lambda number=number: number)  # type: ignore[misc]
        bad = agree(group, fail)
        seen_here.append((good.ok, good.value, seen(bad)))
    return [seen_here, total(group), group.generation]


@pytest.mark.parametrize("world_size", [2, *in_soak(4)])
def test_a_failure_right_after_an_agreement_leaves_that_agreement_alone(world_size: int) -> None:
    rounds = 12
    expected = [(True, number, [(1, "ValueError", "at once")]) for number in range(rounds)]
    for found, together, generation in run_ranks(fail_at_once_after, world_size, rounds):
        assert found == expected
        assert together == sum(range(1, world_size + 1))
        assert generation == rounds


def slow_then_fail(rounds: int, raw: bool) -> list[Any]:
    """A large collective outside any scope; the rank that is through first fails in the scope after it."""
    group = join()
    results = []

    def fail() -> None:
        if group.rank == group.world_size - 1:
            raise ValueError("later")

    for _ in range(rounds):
        if group.rank == 0:
            time.sleep(0.05)
        mine = torch.full((2_000_000,), float(group.rank + 1))
        if raw:
            dist.all_reduce(mine)
            results.append(float(mine.min()))
        else:
            results.append(float(tensors.reduce(group, mine, "sum").min()))
        assert not agree(group, fail).ok
    return results


@pytest.mark.parametrize("raw", [False, True])
def test_a_collective_before_the_scope_is_not_disturbed(raw: bool) -> None:
    assert run_ranks(slow_then_fail, 4, 5, raw) == [[10.0] * 5] * 4


def nested(inner_fails: int | None, outer_fails: int | None, after: bool) -> list[Any]:
    group = join()
    inner_seen: list[Any] = []

    def inner() -> None:
        if group.rank == inner_fails:
            raise ValueError("inner")
        group.barrier()

    def outer() -> str:
        if group.rank == outer_fails and not after:
            raise KeyError("outer")
        inner_seen.append(seen(agree(group, inner)))
        if group.rank == outer_fails and after:
            raise KeyError("outer")
        group.barrier()
        return "done"

    agreement = agree(group, outer)
    again = agree(group, lambda: total(group))
    return [inner_seen, seen(agreement), agreement.value, again.unwrap()]


INNER, OUTER = (1, "ValueError", "inner"), (0, "KeyError", "'outer'")


@pytest.mark.parametrize(
    ("inner_fails", "outer_fails", "after", "inner_seen", "outer_seen"),
    [
        (1, None, False, [[INNER]], []),
        (None, 0, False, None, [OUTER]),
        (None, 0, True, [[]], [OUTER]),
        (1, 0, True, [[INNER]], [OUTER]),
        (1, 0, False, None, None),
    ],
)
def test_scopes_inside_scopes(
    inner_fails: int, outer_fails: int, after: bool, inner_seen: Any, outer_seen: Any
) -> None:
    for found_inner, found_outer, value, together in run_ranks(nested, 4, inner_fails, outer_fails, after):
        if inner_seen is not None:
            assert found_inner == inner_seen
        else:
            assert found_inner == []  # the outer step was given up before the inner one came to an end
        if outer_seen is None:  # one or both, as they come
            assert OUTER in found_outer
            assert set(found_outer) <= {OUTER, INNER}
        else:
            assert found_outer == outer_seen
        assert value == ("done" if outer_fails is None else None)
        assert together == 10


# --- leaving for good --------------------------------------------------------------------------------------------


def leave(kind: type[BaseException], how: str) -> None:
    group = join()
    group.barrier()

    def step() -> None:
        if group.rank == 1:
            time.sleep(0.1)
            raise kind("enough")
        if how == "raw":
            dist.all_reduce(torch.ones(10))
        else:
            total(group)

    start = time.monotonic()
    try:
        agree(group, step)
    finally:
        print(f"left after {time.monotonic() - start:.2f} s at generation {group.generation}")


@pytest.mark.parametrize("how", ["ours", "raw"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_on_one_rank_ends_the_others_soon(kind: type[BaseException], how: str) -> None:
    outcomes = run_ranks(leave, 4, kind, how, on_failure="collect", timeout=20)
    for outcome in outcomes:
        assert "at generation 0" in outcome.output, outcome.error_text
        if outcome.rank == 1:
            assert outcome.error_type == kind.__name__
            continue
        assert outcome.error_type == "PeerFailure"
        assert f"Rank 1 failed: {kind.__name__}: enough" in outcome.error_line
        assert "it has left the job" in outcome.error_line
        assert outcome.seconds < RECOVERY_SECONDS


def killed(victim: int, how: str) -> None:
    group = join(seconds=6.0)  # on a busy host a rank takes seconds to see that another has gone
    group.barrier()

    def step() -> None:
        if group.rank == victim:
            die(signal.SIGKILL)
        if how == "raw":
            dist.all_reduce(torch.ones(10))
        else:
            total(group)

    agree(group, step)


@pytest.mark.parametrize("how", ["raw", *in_soak("ours")])
def test_a_killed_rank_is_missed_by_name(how: str) -> None:
    outcomes: list[Outcome] = run_ranks(killed, 4, 2, how, on_failure="collect", timeout=30)
    assert outcomes[2].exit_code == -9
    for outcome in outcomes:
        if outcome.rank == 2:
            continue
        assert outcome.error_type == "TopologyError", outcome.error_text
        assert "Missing: rank 2." in outcome.error_line
        assert outcome.seconds < 15


def test_when_the_store_dies_with_its_rank_the_others_end_with_an_error() -> None:
    outcomes: list[Outcome] = run_ranks(killed, 4, 0, "ours", on_failure="collect", timeout=30)
    assert outcomes[0].exit_code == -9
    for outcome in outcomes[1:]:
        assert outcome.error_type == "TopologyError", outcome.error_text
        assert "rank 0" in outcome.error_line
        assert outcome.seconds < 15


def connects_when_the_store_is_gone() -> float:
    group = join()
    group.barrier()
    if group.rank == 0:
        die(signal.SIGKILL)
    with pytest.raises(dist.DistNetworkError):  # when its process is gone, its port is closed
        group.store.get("what nobody writes", timeout=timedelta(seconds=30))
    began = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match=r"store at .* does not answer"):
        group.store.clone()
    return time.monotonic() - began


def test_a_store_that_has_died_is_not_connected_to_for_half_an_hour() -> None:
    outcomes: list[Outcome] = run_ranks(connects_when_the_store_is_gone, 2, on_failure="collect", timeout=60)
    assert outcomes[1].error_type is None, outcomes[1].error_text
    assert outcomes[1].value < 15


# --- what an error keeps alive -----------------------------------------------------------------------------------


def remembered(chained: bool, step_raises_on: int) -> tuple[bool, bool, str]:
    group = join()
    references: list[weakref.ref[Any]] = []

    def deep() -> None:
        local = torch.ones(1000)
        references.append(weakref.ref(local))
        if group.rank == step_raises_on:
            raise ValueError("deep")
        group.barrier()

    def step() -> None:
        large = torch.ones(1000)
        references.append(weakref.ref(large))
        if not chained:
            deep()
            return
        try:
            deep()
        except ValueError as error:
            raise RuntimeError("on top") from error

    agreement = agree(group, step)
    gc.collect()
    alive = any(reference() is not None for reference in references)
    return alive, agreement.error is not None, str(agreement.error)


@pytest.mark.parametrize("chained", [False, True])
def test_an_error_holds_no_local_variables(chained: bool) -> None:
    text = "on top" if chained else "deep"
    assert run_ranks(remembered, 2, chained, 1) == [(False, False, "None"), (False, True, text)]


# --- nothing piles up --------------------------------------------------------------------------------------------


def recover_often(count: int) -> dict[str, Any]:
    """Failures while the others are in `gather`, a barrier, or torch's own all-reduce, in turn."""
    job = blocked.Job()
    job.train()
    scenarios = ["gather", "barrier", "gather_object", "all_reduce"]
    counts, slowest = [], 0.0
    for number in range(count):
        round_ = blocked.one_round(job, scenarios[number % len(scenarios)], number)
        slowest = max(slowest, round_.seconds)
        if number == len(scenarios) - 1:
            counts.append(blocked.settle())
    # What the last failure left half done goes with the next: look again after a few more.
    for number in range(5):
        blocked.one_round(job, "barrier", number)
    counts.append(blocked.settle())
    return {"counts": counts, "slowest": slowest, "hook": repr(sys.excepthook), "weights": job.weights()}


def check_nothing_piles_up(results: list[dict[str, Any]], lost: int = 1) -> None:
    """``lost``: now and then gloo loses a wake-up; its group's threads and sockets stay until the group's time-out."""
    for result in results:
        (threads_before, fds_before), (threads_after, fds_after) = result["counts"]
        assert threads_after <= threads_before + 3 * lost
        assert fds_after <= fds_before + len(results) * lost
        assert result["slowest"] < RECOVERY_SECONDS
    assert len({result["weights"] for result in results}) == 1


def test_recoveries_leave_no_threads_or_descriptors() -> None:
    check_nothing_piles_up(run_ranks(recover_often, 2, 20))


def recover_in_backward(count: int) -> list[int]:
    job = blocked.Job()
    job.train()
    counts = []
    for number in range(count):
        blocked.one_round(job, "backward", number)
        counts.append(blocked.settle()[0])
    return counts


def test_failures_in_backward_pile_up_little() -> None:
    # gloo now and then loses a wake-up; that collective's thread stays until the group's time-out.
    for counts in run_ranks(recover_in_backward, 2, 20):
        assert counts[-1] - counts[0] <= 8


def torchs_own_wait() -> list[bool]:
    group, usual, seen = blocked.Job().group, dist.Work.wait, []

    def step() -> None:
        seen.append(dist.Work.wait is usual)
        agree(group, lambda: seen.append(dist.Work.wait is usual))
        if group.rank == 1:
            raise ValueError("here")
        work = dist.all_reduce(torch.ones(10), async_op=True)
        with pytest.raises(RuntimeError):
            work.wait(timedelta(seconds=0.01))  # a limit of the script's own holds
        work.wait()

    agree(group, step)
    agree(group, lambda: dist.all_reduce(torch.ones(10)))
    return [*seen, dist.Work.wait is usual]


def test_what_torch_waits_with_is_replaced_in_a_common_step_only() -> None:
    assert run_ranks(torchs_own_wait, 2) == [[False, False, True]] * 2


# --- alone -------------------------------------------------------------------------------------------------------


def fail_alone() -> None:
    raise ValueError("alone")


def test_alone_in_the_world_a_failure_is_told_the_same_way() -> None:
    group = Group.connect(Topology(device=torch.device("cpu")))
    good = agree(group, lambda: 5)
    assert (good.ok, good.unwrap(), good.error) == (True, 5, None)
    bad = agree(group, fail_alone)
    assert seen(bad) == [(0, "ValueError", "alone")]
    assert "fail_alone" in bad.failures[0].details
    with pytest.raises(ValueError, match="alone"):
        bad.unwrap()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        agree(group, interrupt)


def another_accelerator() -> tuple[int, list[int], int]:
    """The Accelerator made before a failure talks through the new group."""
    accelerator = Accelerator(cpu=True)
    group = current.require().group
    first = group.pg

    def step() -> None:
        if accelerator.is_main_process:
            raise ValueError("once")
        accelerator.wait_for_everyone()

    agree(group, step)
    assert group.pg is not first
    assert dist.group.WORLD is group.pg
    return int(accelerator.reduce(torch.tensor(1))), all_objects(group, os.getpid()), os.getpid()


def test_an_accelerator_made_before_stays_valid() -> None:
    results = run_ranks(another_accelerator, 2)
    assert [together for together, _, _ in results] == [2, 2]
    assert results[0][1] == results[1][1] == [pid for _, _, pid in results]
