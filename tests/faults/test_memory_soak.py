"""Out of memory at every place on 4 ranks, and again and again on 2."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.testing import run_ranks
from tests.faults import exhausted
from tests.faults.exhausted import furthest
from tests.faults.idle import busy_threads
from tests.faults.test_memory import CLOSE, check_parts, check_search

pytestmark = pytest.mark.soak


@pytest.mark.parametrize(
    ("world_size", "rounds"),
    [(2, 1), (4, 1), pytest.param(2, 10, marks=pytest.mark.soak_long), pytest.param(4, 6, marks=pytest.mark.soak_long)],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_place_again_and_again(world_size: int, rounds: int, accumulation: int) -> None:
    plans = exhausted.every_place(world_size)
    whole = run_ranks(exhausted.search, world_size, None, accumulation=accumulation)[0]
    for _ in range(rounds):
        found = run_ranks(exhausted.search_everywhere, world_size, plans, accumulation, timeout=300.0)
        check_search(plans, found, whole, accumulation)


@pytest.mark.parametrize("samples", [128, 124])  # 4 micro-batches; in the last one half of rank 3's may be repeats
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("reproducible", [False, True])
def test_every_part_of_a_batch_on_four_ranks(samples: int, accumulation: int, reproducible: bool) -> None:
    options: dict[str, Any] = {"samples": samples, "reproducible": reproducible}
    check_parts(4, exhausted.every_part(4, steps=4), accumulation, **options)


def test_a_rank_that_has_only_repeats_takes_part() -> None:
    """It has nothing to compute, so its losses say nothing; it still splits with the others."""
    options: dict[str, Any] = {"samples": 120, "reproducible": True}
    plans = [plan for plan in exhausted.every_part(4, steps=4) if plan.at == 3 and plan.part is None]
    whole = run_ranks(exhausted.train_in_parts, 4, None, accumulation=2, plain=True, **options)
    split = run_ranks(exhausted.split_everywhere, 4, plans, 2, timeout=300.0, **options)
    for rank, parts_by_plan in enumerate(split):
        for plan, parts in zip(plans, parts_by_plan, strict=True):
            assert furthest(parts.weights, whole[rank].weights) < CLOSE, plan
            assert parts.limit == (None if plan.rank == 3 else 4), plan


@pytest.mark.parametrize("number", range(12))
def test_where_ddp_exchanges_which_parameters_were_used(number: int) -> None:
    assert run_ranks(exhausted.with_unused_parameters, 3, 12) == [[2] * 12] * 3
    # gloo's event loop would spin on connections of the groups that are kept, in about every 20th recovery.
    assert run_ranks(busy_threads, 3) == [[]] * 3
