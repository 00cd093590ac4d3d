"""Which ranks have which part of a batch."""

from __future__ import annotations

from lockstep.topology.data_parallel import DataParallelRanks


def test_each_rank_has_a_part_of_its_own() -> None:
    found = DataParallelRanks(2, range(4))
    assert (found.rank, found.size, found.peers, found.leads) == (2, 4, (0, 1, 2, 3), True)


def test_two_ranks_share_each_part() -> None:
    ranks = [DataParallelRanks(rank, [0, 0, 1, 1]) for rank in range(4)]
    assert [(one.rank, one.size, one.peers, one.leads) for one in ranks] == [
        (0, 2, (0, 2), True),
        (0, 2, (1, 3), False),
        (1, 2, (0, 2), True),
        (1, 2, (1, 3), False),
    ]
