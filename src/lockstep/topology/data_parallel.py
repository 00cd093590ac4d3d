"""How a job's ranks divide the samples of a global batch between them."""

from __future__ import annotations

from collections.abc import Sequence


class DataParallelRanks:
    """The data-parallel ranks of a job, of which there may be fewer than processes: some may share a part of a batch.

    Args:
        rank: Of this process in the job.
        parts: Of each process in the job, the number of its part.
    """

    def __init__(self, rank: int, parts: Sequence[int]) -> None:
        self.parts = tuple(parts)
        """Of each process in the job, its data-parallel rank."""
        self.rank = self.parts[rank]
        """This process's data-parallel rank: which part of a batch is its own."""
        self.size = max(self.parts) + 1
        """Into how many parts a batch is divided."""
        members: dict[int, list[int]] = {}
        for other, part in enumerate(self.parts):
            members.setdefault(part, []).append(other)
        copy = members[self.rank].index(rank)
        self.peers = tuple(members[part][copy] for part in range(self.size))
        """The processes that have a whole batch between them, this one included, in the order of their parts."""
        self.leads = copy == 0
        """Whether it is the first process with this part."""
