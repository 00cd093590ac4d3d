"""Out of memory at every place on 4 ranks, and again and again on 2."""

from __future__ import annotations

import pytest

from lockstep.testing import Ranks
from tests.faults import blocked, exhausted
from tests.faults.test_memory import check_search

pytestmark = pytest.mark.soak


@pytest.mark.parametrize(("world_size", "rounds"), [(2, 5), (4, 3)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_place_again_and_again(world_size: int, rounds: int, accumulation: int) -> None:
    plans = exhausted.every_place(world_size)
    with Ranks(world_size, timeout=300.0, env=blocked.QUICK_NAMES) as pool:
        whole = pool.run(exhausted.search, None, accumulation=accumulation)[0]
        for _ in range(rounds):
            check_search(plans, pool.run(exhausted.search_everywhere, plans, accumulation), whole, accumulation)


@pytest.mark.parametrize("number", range(12))
def test_where_ddp_exchanges_which_parameters_were_used(number: int) -> None:
    with Ranks(3, timeout=60.0, env=blocked.QUICK_NAMES) as pool:
        assert pool.run(exhausted.with_unused_parameters, 12) == [[2] * 12] * 3
