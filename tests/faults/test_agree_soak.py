"""The full matrix of failures: every scenario, on 2 and 4 ranks, 20 times out of 20."""

from __future__ import annotations

import pytest

from lockstep.testing import Ranks
from tests.faults import blocked, test_agree

pytestmark = pytest.mark.soak
COUNT = 20


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scenario", list(blocked.BLOCKED))
def test_twenty_out_of_twenty(scenario: str, world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    with Ranks(world_size, timeout=150.0, env=blocked.QUICK_NAMES) as pool:
        reports = pool.run(blocked.rounds, scenario, COUNT, 7)
    problems = blocked.problems(reports, COUNT)
    seconds = sorted(round_.seconds for report in reports for round_ in report.rounds)
    bad = {problem.partition(",")[0].partition(":")[0] for problem in problems}
    with capsys.disabled():
        print(
            f"\n{scenario}, {world_size} ranks: {COUNT - len(bad)} of {COUNT} recovered, median "
            f"{1000 * seconds[len(seconds) // 2]:.0f} ms, slowest {1000 * seconds[-1]:.0f} ms, threads at the end "
            f"{[report.threads[-1] for report in reports]}"
        )
    assert problems == []


@pytest.mark.parametrize("world_size", [2, 4])
def test_two_hundred_recoveries_leave_nothing(world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    with Ranks(world_size, timeout=300.0, env=blocked.QUICK_NAMES) as pool:
        results = pool.run(test_agree.recover_often, 200)
    with capsys.disabled():
        for rank, result in enumerate(results):
            print(f"\n200 recoveries, rank {rank} of {world_size}: (threads, descriptors) {result['counts']}", end="")
        print()
    test_agree.check_nothing_piles_up(results, lost=3)
