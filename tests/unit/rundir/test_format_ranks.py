"""Ranks in words."""

from __future__ import annotations

import pytest

from lockstep.rundir.format_ranks import name_ranks


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([5, 2, 0, 1], "ranks 0-2, 5"),
        ([4, 4], "rank 4"),
        ([*range(2048), *range(2049, 4096)], "ranks 0-2047, 2049-4095"),
    ],
)
def test_runs_are_named_by_their_ends(ranks: list[int], said: str) -> None:
    assert name_ranks(ranks) == said
    assert name_ranks(ranks, most=2) == said


def test_a_long_list_is_cut() -> None:
    assert name_ranks(range(0, 4096, 2), most=3) == "ranks 0, 2, 4, … (2048 in all)"
