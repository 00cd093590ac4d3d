"""One rank runs out of memory: all try again together, with the same smaller batch, to the same result."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep import Accelerator, NumericsError, find_executable_batch_size
from lockstep.testing import run_ranks
from tests.faults import exhausted
from tests.faults.exhausted import Plan, furthest
from tests.faults.jobs import Job, Result, run
from tests.faults.test_guard import STOPPED

CLOSE = 1e-6


def check_search(
    plans: list[Plan], results: list[list[exhausted.Seen]], whole: exhausted.Seen, accumulation: int
) -> None:
    for rank, seen_by_plan in enumerate(results):
        for plan, seen in zip(plans, seen_by_plan, strict=True):
            told = f"{plan}, seen by rank {rank}"
            assert seen.error == "", told
            sizes = [exhausted.START, exhausted.START // 2]
            # A rank that is late may hear of the failure before it has begun.
            assert seen.sizes == sizes or (seen.sizes == sizes[1:] and rank != plan.rank), told
            assert seen.steps == 2 * accumulation, told
            assert set(seen.alive) == {0}, f"{told}: what the failed attempt held is still there"
            assert seen.same_accelerator, told
            assert furthest(seen.weights, whole.weights) < CLOSE, told


def check_parts(world_size: int, plans: list[Plan], accumulation: int, **options: Any) -> None:
    whole = run_ranks(exhausted.train_in_parts, world_size, None, accumulation=accumulation, plain=True, **options)
    split = run_ranks(exhausted.split_everywhere, world_size, plans, accumulation, timeout=300.0, **options)
    for rank, parts_by_plan in enumerate(split):
        for plan, parts in zip(plans, parts_by_plan, strict=True):
            told = f"{plan}, seen by rank {rank}"
            assert furthest(parts.weights, whole[rank].weights) < CLOSE, told
            assert parts.losses == pytest.approx(whole[rank].losses, abs=1e-5), told
            assert parts.samples == whole[rank].samples, told
            begins = exhausted.START if plan.part is None else exhausted.START // 2
            rows = whole[plan.rank].sizes[plan.at][0]  # the last batch may be small enough
            fails = rows > plan.fits if plan.part is None else rows > begins
            limit = {4: 4, 3: 2, 2: 2, 1: 1}[plan.fits]
            assert parts.limit == (limit if fails else None if plan.part is None else begins), told
            assert max(parts.sizes[plan.at][-2:]) <= (limit if fails else begins), told
            assert {size for sizes in parts.sizes[: plan.at] for size in sizes} <= {begins}, told


# --- the search --------------------------------------------------------------------------------------------------


def test_every_rank_phase_and_micro_step_leads_to_the_same_parameters() -> None:
    accumulation = 2
    plans = exhausted.every_place(2)
    (whole, _) = run_ranks(exhausted.search, 2, None, accumulation=accumulation)
    assert whole.sizes == [exhausted.START]
    check_search(plans, run_ranks(exhausted.search_everywhere, 2, plans, accumulation), whole, accumulation)


def test_a_reproducible_run_stays_so_when_batches_do_not_come_out_even() -> None:
    options = {"samples": 60, "reproducible": True}
    (whole, _) = run_ranks(exhausted.search, 2, None, **options)
    for seen in run_ranks(exhausted.search, 2, Plan(1, "backward", 1, fits=2), **options):
        assert (seen.error, seen.sizes, seen.steps) == ("", [8, 4, 2], 4)
        assert furthest(seen.weights, whole.weights) < CLOSE


def test_a_real_lack_of_memory_on_one_rank() -> None:
    for sizes, found in run_ranks(exhausted.really, 2, 1):
        assert sizes[0] == 16
        assert found == sizes[-1] < 16
        assert sizes == [16 >> number for number in range(len(sizes))]


def test_going_up_again() -> None:
    plan = Plan(1, "backward", 1, fits=45)
    for seen in run_ranks(exhausted.search, 2, plan, keep=False, start=64, samples=256, search="binary"):
        assert seen.error == ""
        assert seen.sizes[:2] == [64, 32]
        assert 40 <= seen.sizes[-1] <= 45
        assert len(seen.sizes) < 10
        assert set(seen.alive) == {0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_bar() -> str:
    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=16, search="binary")
    def inner(size: int) -> None:
        accelerator.wait_for_everyone()
        if size > 9 and accelerator.process_index == 1:
            raise MemoryError

    with redirect_stderr(Terminal()) as read:
        inner()
    return read.getvalue()


def test_the_main_process_alone_shows_a_bar() -> None:
    first, second = run_ranks(shown_bar, 2)
    assert "batch size: attempt 3 of at most 5, trying 11 (8 fits, 16 does not)" in first
    assert "attempt" not in second


def test_going_up_again_with_the_effective_batch_kept() -> None:
    (whole, _) = run_ranks(exhausted.search, 2, None, start=24, samples=96)
    for seen in run_ranks(exhausted.search, 2, Plan(0, "forward", 1, fits=9), start=24, samples=96, search="binary"):
        assert (seen.error, seen.sizes[-1], seen.steps) == ("", 8, 3)
        assert furthest(seen.weights, whole.weights) < CLOSE


def test_what_is_no_lack_of_memory_is_raised_on_all() -> None:
    results = run_ranks(exhausted.search, 2, Plan(1, "forward", 1, error="the mask is broken"))
    assert [seen.sizes for seen in results] == [[8], [8]]
    assert results[1].error == "Faked: the mask is broken"
    assert results[0].error.startswith("PeerFailure: The attempt failed on another rank (rank 1: Faked: the mask is")


def test_nothing_fits() -> None:
    for seen in run_ranks(exhausted.search, 2, Plan(0, "step", 0, fits=0)):
        assert seen.sizes == [8, 4, 2, 1]
        assert "OutOfMemory: No executable batch size found, reached zero. Tried: 8, 4, 2, 1." in seen.error
        assert "rank 0 ran out of memory (tried to allocate 2.0 GiB)" in seen.error
        assert "exhausted.py" in seen.error  # where


def own_sizes() -> tuple[list[int], str]:
    accelerator = Accelerator(cpu=True)
    sizes, error = [], ""

    @find_executable_batch_size(starting_batch_size=12, reduce_batch_size_fn=lambda: 7 - accelerator.process_index)
    def inner(size: int) -> None:
        sizes.append(size)
        accelerator.wait_for_everyone()  # a rank that comes after the other's failure would leave the size out
        if size == 12:
            raise MemoryError

    inner()
    different = find_executable_batch_size(lambda size: None, starting_batch_size=4 + accelerator.process_index)
    try:
        different()
    except ValueError as caught:
        error = str(caught)
    return sizes, error


def test_all_ranks_take_rank_0s_next_size_and_the_same_first_one() -> None:
    for sizes, error in run_ranks(own_sizes, 2):
        assert sizes == [12, 7]
        assert error.startswith("starting_batch_size differs between ranks (rank 0: 4, rank 1: 5)")


# --- micro-batches -----------------------------------------------------------------------------------------------


UNEVEN = [(1, {}), (2, {}), (1, {"samples": 60}), (2, {"samples": 60, "reproducible": True})]


@pytest.mark.parametrize(("accumulation", "options"), UNEVEN)
def test_a_batch_is_split_on_all_ranks(accumulation: int, options: dict[str, Any]) -> None:
    plans = [plan for plan in exhausted.every_part(2, 4) if plan.part is None or accumulation == 2]
    check_parts(2, [*plans, Plan(0, "backward", 1, 1), Plan(1, "forward", 2, 3)], accumulation, **options)


def test_without_a_lack_of_memory_it_is_the_plain_training() -> None:
    whole = run_ranks(exhausted.train_in_parts, 2, None, plain=True)
    for rank, parts in enumerate(run_ranks(exhausted.train_in_parts, 2, None)):
        assert furthest(parts.weights, whole[rank].weights) == 0
        assert parts.limit is None


def test_a_real_lack_of_memory_splits_the_batch() -> None:
    for size, gradient in run_ranks(exhausted.really_in_parts, 2, 0):
        assert size is not None
        assert size < 16
        assert gradient == pytest.approx(7.5)


def refusals() -> list[str]:
    accelerator = Accelerator(cpu=True)
    accelerator.free_memory()
    told = []
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model = accelerator.prepare(net)
    net.append(torch.nn.SyncBatchNorm(4))  # here, because torch prepares it for devices only
    for attempt in (
        lambda: accelerator.auto_microbatch(torch.ones(4, 4), lambda part: model(part).mean()),
        lambda: accelerator.auto_microbatch({"name": "x"}, lambda part: part),
    ):
        try:
            attempt()
        except RuntimeError as error:
            told.append(str(error))
    accelerator.free_memory()
    model = accelerator.prepare(torch.nn.Linear(4, 4))

    def never(part: Tensor) -> Tensor:
        if accelerator.process_index == 1:
            raise MemoryError
        return model(part).mean()

    try:
        accelerator.auto_microbatch(torch.ones(4, 4), never)
    except RuntimeError as error:
        told.append(str(error))
    return told


def test_what_cannot_be_split_is_refused_on_all() -> None:
    for sync, nothing, never in run_ranks(refusals, 2):
        assert "SyncBatchNorm needs all ranks" in sync
        assert "no tensor of this batch" in nothing
        assert "even parts of 1 sample do not fit: rank 1 ran out of memory" in never


def with_a_zero(policy: str) -> tuple[list[bool], list[Tensor], str]:
    """Rank 1's second batch has a zero in its third sample, of which the model makes an infinity; and is too large."""
    accelerator = Accelerator(cpu=True, nan_policy=policy)
    values = torch.arange(1.0, 25.0).view(-1, 1)
    values[14] = 0.0
    torch.manual_seed(0)
    net = torch.nn.Linear(1, 1)
    loader: DataLoader[Any] = DataLoader(values, batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.001), loader)
    skipped, error = [], ""

    def compute_loss(part: Tensor) -> Tensor:
        if len(part) > 2 and 0.0 in part:
            raise MemoryError
        return model(1 / part).square().mean()

    try:
        for batch in loader:
            accelerator.auto_microbatch(batch, compute_loss)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
    except NumericsError as caught:
        error = str(caught)
    return skipped, [parameter.detach() for parameter in net.parameters()], error


def test_a_bad_loss_of_a_part_drops_the_update_on_all_ranks() -> None:
    outcomes = run_ranks(with_a_zero, 2, "skip", on_failure="collect")
    assert [outcome.error_text for outcome in outcomes] == ["", ""]
    (skipped, weights, _), (others_skipped, others_weights, _) = (outcome.value for outcome in outcomes)
    assert skipped == others_skipped == [False, True, False]
    assert furthest(weights, others_weights) == 0
    assert all(bool(weight.isfinite().all()) for weight in weights)
    told = [text for outcome in outcomes for text in outcome.output.split("WARNING ") if "nan_policy='skip'" in text]
    assert len(told) == 1
    assert "the update is dropped on all ranks" in told[0]
    assert "rank 1: the loss is inf, samples 14, 15" in told[0]
    assert "rank 0:" not in told[0]


def test_a_bad_loss_of_a_part_is_told_or_stops_all_ranks() -> None:
    outcomes = run_ranks(with_a_zero, 2, "warn", on_failure="collect")
    assert [outcome.output.count("lockstep.numerics: ") for outcome in outcomes] == [0, 1]
    assert "Update 2, rank 1: the loss is inf, samples 14, 15." in outcomes[1].output
    (skipped, _, error), (others_skipped, _, others_error) = run_ranks(with_a_zero, 2, "stop")
    assert skipped == others_skipped == [False]
    assert error == others_error
    assert "rank 1: the loss is inf, samples 14, 15" in error


# --- four ranks --------------------------------------------------------------------------------------------------


def test_four_ranks_recover_together() -> None:
    """Every rank once, in different phases and micro-steps; the soak tests have every combination."""
    plans = [Plan(0, "step", 1), Plan(1, "loader"), Plan(2, "backward", 1), Plan(3, "forward")]
    whole = run_ranks(exhausted.search, 4, None, accumulation=2)[0]
    check_search(plans, run_ranks(exhausted.search_everywhere, 4, plans, 2), whole, 2)
    plans = [Plan(rank, phase, rank % 2) for rank, phase in enumerate(("forward", "backward") * 2)]
    check_parts(4, [*plans, Plan(3, "backward", 1, 2, part=1)], 2)


# --- the guard and the last words --------------------------------------------------------------------------------


def short_of_memory(folder: Path, scenario: str) -> Result:
    return run(folder, Job(scenario=scenario, script="short_of_memory.py"))


def test_the_guard_is_quiet_while_ranks_recover(tmp_path: Path) -> None:
    result = short_of_memory(tmp_path, "recovers")
    assert result.code == 0, result
    assert result.text.count("found 4") == 2, result
    assert "deadlock" not in result.text.lower(), result
    assert "waits" not in result.text, result
    assert "batch size 8 does not fit: rank 1 ran out of memory (tried to allocate 2.0 GiB); trying 4" in result.text


def test_the_guard_still_stops_a_deadlock_in_an_attempt(tmp_path: Path) -> None:
    result = short_of_memory(tmp_path, "deadlock")
    assert result.code == STOPPED, result
    assert "short_of_memory.py" in result.text
    assert "while recovering" not in result.text


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is limited by what Linux says")
def test_an_out_of_memory_that_nobody_catches_is_put_into_words(tmp_path: Path) -> None:
    result = short_of_memory(tmp_path, "uncaught")
    assert result.code == 1, result
    box = result.text.partition("the job failed")[2]
    words = " ".join(box.split())
    where = r"Out of memory on rank 1 \(host\) at \S*short_of_memory.py:\d+"
    assert re.search(rf"^─+ {where}.*: tried to allocate 500.0 MiB, .* free\.", words), result
    assert "wide (weights 1.0 MiB, optimizer 2.0 MiB)" in words, result
    assert "hidden [32, 4096] float32, in Net.forward (short_of_memory.py:" in words, result
    assert "Fix 1. " in words, result
    assert "batch_size=16, gradient_accumulation_steps=2" in words, result
    assert "2. Compute in half precision" in words, result
