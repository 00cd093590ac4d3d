"""Data-parallel ranks hold the same weights. Every so many optimizer steps they compare, and nobody waits for it.

Each rank puts its checksums into the job's store; rank 0 reads them when it comes to a later step, which it cannot do
before all ranks have made this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from lockstep.comm.replicas import Checksums, checksums, difference, label
from lockstep.config import env
from lockstep.config.resolve import resolve
from lockstep.logging import get_notices
from lockstep.process_group.group import Group

EVERY = 500
"""Optimizer steps between two comparisons, unless set otherwise."""
_IN_A_ROW = 3
"""Reductions in a row at which they must differ where the steps are not known."""
_TRIES = 20
"""Steps for which rank 0 looks whether what the others sent has arrived."""

Named = Sequence[tuple[str, Tensor]]


def read_interval() -> int:
    """Optimizer steps between two comparisons; 0 for none."""
    return max(0, resolve("replica_check_steps", None, EVERY, env.snapshot(), env.parse_int).value)


@dataclass(frozen=True, kw_only=True)
class _Expected:
    """Checksums that all ranks have posted, or will have in a moment."""

    count: int
    """Steps, or reductions, after which they were taken."""
    unowned: bool
    names: list[str]
    keys: list[str]


class ReplicaCheck:
    """Compares the ranks' parameters now and then, and warns once.

    Right after a step of a prepared optimizer they must be the same. Of an optimizer that is not prepared nobody knows
    when it steps: there the moment before a reduction is taken, at which an algorithm may have moved the weights on
    purpose, to move them back. So three in a row must differ.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._every = read_interval()
        self._expected: _Expected | None = None
        self._tries = 0
        self._equal = self._first = self._differed = 0
        self._warned = False

    def is_due(self, count: int, unowned: bool = False) -> bool:
        """Whether there is something to do after so many steps, or reductions."""
        return self._expected is not None or self._posts(count, unowned)

    def check(self, count: int, parameters: Named, unowned: bool = False) -> None:
        """So many steps or reductions were made, and these parameters ought to be the same on all ranks."""
        if self._expected is not None:
            self._compare()
        if parameters and self._posts(count, unowned):
            self._post(count, parameters, unowned)

    def _posts(self, count: int, unowned: bool) -> bool:
        every = self._every
        return 0 < every <= count and count % every < (_IN_A_ROW if unowned else 1)

    def restart(self) -> None:
        """Steps are counted anew."""
        self._expected = None
        self._equal = self._differed = 0

    def _post(self, count: int, parameters: Named, unowned: bool) -> None:
        group = self._group
        names = [name for name, _ in parameters]
        prefix = group.key(f"replicas/{label(names)}")
        mine = checksums(count, (parameter for _, parameter in parameters))
        with suppress(RuntimeError):
            group.store.set(f"{prefix}/{group.rank}", mine.pack())
        if group.rank == 0:
            keys = [f"{prefix}/{rank}" for rank in range(group.world_size)]
            self._expected = _Expected(count=count, unowned=unowned, names=names, keys=keys)
            self._tries = 0

    def _compare(self) -> None:
        expected = self._expected
        assert expected is not None
        self._tries += 1
        found = self._fetch(expected)
        complete = len(found) == len(expected.keys)
        if complete or self._tries == _TRIES:
            self._expected = None
        if not complete:
            return
        differs = difference(found, expected.names)
        if differs is None:
            self._equal, self._differed = expected.count, 0
            return
        self._differed += 1
        if self._differed == 1:
            self._first = expected.count
        if self._differed >= (_IN_A_ROW if expected.unowned else 1) and not self._warned:
            self._warned = True
            counted = "reductions" if expected.unowned else "optimizer steps"
            get_notices("lockstep.replicas").warning(
                f"The weights are no longer the same on all ranks: after {self._first} {counted} {differs}; after "
                f"{self._equal} they were the same. From there on the ranks train different models. Look for an "
                "optimizer that was not passed to prepare() or steps on some ranks only, and for code that writes "
                "weights on one rank. To find the step, run with LOCKSTEP_REPLICA_CHECK_STEPS=1; then load a "
                "checkpoint from before it."
            )

    def _fetch(self, expected: _Expected) -> dict[int, Checksums]:
        """What has arrived of it."""
        store, keys = self._group.store, expected.keys
        with suppress(RuntimeError):  # whoever keeps the store has ended: the job learns of that elsewhere
            values = store.peek_all(keys, Checksums.unpack) or []
            return {rank: sums for rank, sums in enumerate(values) if sums.steps == expected.count}
        return {}
