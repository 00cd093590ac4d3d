"""The full matrix of failures: every scenario, on 2 and 4 ranks, each time anew."""

from __future__ import annotations

import pytest

from lockstep.testing import run_ranks
from tests.durations import Note
from tests.faults import blocked, test_agree


@pytest.mark.parametrize(
    "count", [pytest.param(20, marks=pytest.mark.soak), pytest.param(100, marks=pytest.mark.soak_long)]
)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scenario", list(blocked.BLOCKED))
def test_every_failure_is_recovered_from(scenario: str, world_size: int, count: int, note: Note) -> None:
    reports = run_ranks(blocked.rounds, world_size, scenario, count, 7, timeout=60.0 + 5.0 * count)
    problems = blocked.problems(reports, count)
    seconds = sorted(round_.seconds for report in reports for round_ in report.rounds)
    bad = {problem.partition(",")[0].partition(":")[0] for problem in problems}
    note(
        f"{scenario}, {world_size} ranks: {count - len(bad)} of {count} recovered, median "
        f"{1000 * seconds[len(seconds) // 2]:.0f} ms, slowest {1000 * seconds[-1]:.0f} ms, threads at the end "
        f"{[report.threads[-1] for report in reports]}"
    )
    assert problems == []


@pytest.mark.parametrize(
    "count", [pytest.param(100, marks=pytest.mark.soak), pytest.param(500, marks=pytest.mark.soak_long)]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_many_recoveries_leave_nothing(world_size: int, count: int, note: Note) -> None:
    results = run_ranks(test_agree.recover_often, world_size, count, timeout=60.0 + count)
    for rank, result in enumerate(results):
        note(f"{count} recoveries, rank {rank} of {world_size}: (threads, descriptors) {result['counts']}")
    test_agree.check_nothing_piles_up(results, lost=3 * -(-count // 200))
