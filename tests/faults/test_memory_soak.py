"""Out of memory at every place on 4 ranks, and again and again on 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.testing import Ranks
from tests.faults import blocked, exhausted
from tests.faults.exhausted import furthest
from tests.faults.test_memory import CLOSE, check_parts, check_search

pytestmark = pytest.mark.soak


@pytest.mark.parametrize(("world_size", "rounds"), [(2, 5), (4, 3)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_place_again_and_again(world_size: int, rounds: int, accumulation: int) -> None:
    plans = exhausted.every_place(world_size)
    with Ranks(world_size, timeout=300.0, env=blocked.QUICK_NAMES) as pool:
        whole = pool.run(exhausted.search, None, accumulation=accumulation)[0]
        for _ in range(rounds):
            check_search(plans, pool.run(exhausted.search_everywhere, plans, accumulation), whole, accumulation)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, timeout=300.0, env=blocked.QUICK_NAMES) as made:
        yield made


@pytest.mark.parametrize("samples", [128, 124])  # 4 micro-batches; in the last one half of rank 3's may be repeats
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("reproducible", [False, True])
def test_every_part_of_a_batch_on_four_ranks(four: Ranks, samples: int, accumulation: int, reproducible: bool) -> None:
    options: dict[str, Any] = {"samples": samples, "reproducible": reproducible}
    check_parts(four, exhausted.every_part(4, steps=4), accumulation, **options)


def test_a_rank_that_has_only_repeats_takes_part(four: Ranks) -> None:
    """It has nothing to compute, so its losses say nothing; it still splits with the others."""
    options: dict[str, Any] = {"samples": 120, "reproducible": True}
    plans = [plan for plan in exhausted.every_part(4, steps=4) if plan.at == 3 and plan.part is None]
    whole = four.run(exhausted.train_in_parts, None, accumulation=2, plain=True, **options)
    for rank, parts_by_plan in enumerate(four.run(exhausted.split_everywhere, plans, 2, **options)):
        for plan, parts in zip(plans, parts_by_plan, strict=True):
            assert furthest(parts.weights, whole[rank].weights) < CLOSE, plan
            assert parts.limit == (None if plan.rank == 3 else 4), plan


@pytest.mark.parametrize("number", range(12))
def test_where_ddp_exchanges_which_parameters_were_used(number: int) -> None:
    with Ranks(3, timeout=60.0, env=blocked.QUICK_NAMES) as pool:
        assert pool.run(exhausted.with_unused_parameters, 12) == [[2] * 12] * 3
