"""Ranks of one node that get in each other's way, and those that only seem to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.doctor.finding import Finding
from lockstep.doctor.net import cpu_affinity
from lockstep.doctor.net.results import RankInfo


def ranks(*tied: Sequence[int], threads: int | None = 1, share: float | None = None, host: str = "a") -> list[RankInfo]:
    return [
        RankInfo(rank=rank, host=host, cores=own, threads=threads, share=share)
        for rank, own in enumerate(map(list, tied))
    ]


def judged(members: Sequence[RankInfo], check: str = "cores") -> Finding:
    (finding,) = [finding for finding in cpu_affinity.findings(members) if finding.check == check]
    return finding


def test_each_on_cores_of_its_own() -> None:
    finding = judged(ranks([0], [1]))
    assert (finding.status, finding.what) == ("ok", "a: 2 ranks on 2 cores, 1 for each rank alone")
    assert judged(ranks([0, 1], [2, 3], threads=2), "threads").status == "ok"


def test_all_on_all_cores() -> None:
    finding = judged(ranks(range(8), range(8)))
    assert (finding.status, finding.what) == ("ok", "a: 2 ranks on 8 cores")


def test_those_that_share_too_few_are_named() -> None:
    finding = judged(ranks([0], [0], [1, 2]))
    assert finding.status == "warning"
    assert finding.what == "a: ranks 0-1 on core 0"
    assert "--bind-to none" in finding.fix


def test_more_ranks_than_cores() -> None:
    assert judged(ranks([0, 1], [0, 1], [0, 1])).what == "a: ranks 0-2 on cores 0-1"


def test_the_control_group_counts() -> None:
    finding = judged(ranks(range(8), range(8), share=1.5))
    assert finding.status == "warning"
    assert "the control group allows the time of 1.5" in finding.what
    assert judged(ranks(range(8), range(8), share=16.0)).what == "a: 2 ranks on 8 cores"


@pytest.mark.parametrize(
    ("members", "what"),
    [
        (ranks(range(4), range(4), threads=4), "a: 8 threads of ranks 0-1 on cores 0-3"),
        (ranks([0], [1], threads=2), "a: 2 threads of rank 0 on core 0"),
        (
            ranks(range(4), range(4), threads=None),
            "a: 8 threads of ranks 0-1 on cores 0-3: OMP_NUM_THREADS does not say how many, so torch takes one for "
            "each core",
        ),
    ],
)
def test_too_many_threads(members: list[RankInfo], what: str) -> None:
    finding = judged(members, "threads")
    assert (finding.status, finding.what) == ("warning", what)
    assert finding.fix.startswith("export OMP_NUM_THREADS=")


def test_machines_that_are_alike_are_told_once() -> None:
    members = [each for host in "abc" for each in ranks([0], [1], host=host)] + ranks([0], [0], host="d")
    told = [finding for finding in cpu_affinity.findings(members) if finding.check == "cores"]
    assert [(finding.status, finding.what) for finding in told] == [
        ("ok", "a and 2 more that are alike: 2 ranks on 2 cores, 1 for each rank alone"),
        ("warning", "d: ranks 0-1 on core 0"),
    ]
    assert told[0].data["hosts"] == ["a", "b", "c"]


def test_ranks_that_have_said_nothing_are_left_out() -> None:
    assert list(cpu_affinity.findings([RankInfo(rank=0, host="a")])) == []


@given(st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=1, max_size=8))
def test_it_warns_just_where_no_core_can_be_given_to_each(tied: list[set[int]]) -> None:
    """As many as there are have a core each, by Hall's theorem, unless some sets of ranks have too few together."""
    warned = judged(ranks(*map(sorted, tied))).status == "warning"
    if not _matched(tied):
        # Only crowds that fit into the cores of one rank, or of all, are looked for: those that launchers make.
        sets = [*tied, set().union(*tied)]
        assert warned == any(sum(own <= cores for own in tied) > len(cores) for cores in sets)
    else:
        assert not warned


def _matched(tied: list[set[int]]) -> bool:
    """Whether each rank can have a core alone."""
    holder: dict[int, int] = {}

    def seat(rank: int, tried: set[int]) -> bool:
        for core in tied[rank] - tried:
            tried.add(core)
            if core not in holder or seat(holder[core], tried):
                holder[core] = rank
                return True
        return False

    return all(seat(rank, set()) for rank in range(len(tied)))
