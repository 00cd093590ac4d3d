"""Data-parallel ranks hold the same weights. Every so many optimizer steps they compare, and nobody waits for it.

Each rank puts its checksums into the job's store; rank 0 reads them when it comes to a later step, which it cannot do
before all ranks have made this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from lockstep.comm.replicas import Checksums, checksums, difference, label
from lockstep.config import env
from lockstep.config.resolve import resolve
from lockstep.logging import get_notices
from lockstep.topology.group import Group

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


class ReplicaCheck:
    """Compares the ranks' parameters now and then, and warns once.

    Right after a step of a prepared optimizer they must be the same. Of an optimizer that is not prepared nobody knows
    when it steps: there the moment before a reduction is taken, at which an algorithm may have moved the weights on
    purpose, to move them back. So three in a row must differ.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._every = read_interval()
        self._expected: tuple[int, list[str], list[str]] | None = None
        self._tries = 0
        self._equal = self._first = self._differed = 0
        self._warned = False

    def is_due(self, count: int, unowned: bool = False) -> bool:
        """Whether there is something to do after so many steps, or reductions."""
        if not self._every:
            return False
        return self._expected is not None or count % self._every < (_IN_A_ROW if unowned else 1)

    def look(self, count: int, parameters: Named, unowned: bool = False) -> None:
        """So many steps or reductions were made, and these parameters ought to be the same on all ranks."""
        if self._expected is not None:
            self._compare("reductions" if unowned else "optimizer steps", _IN_A_ROW if unowned else 1)
        if parameters and count % self._every < (_IN_A_ROW if unowned else 1):
            self._post(count, parameters)

    def restart(self) -> None:
        """Steps are counted anew."""
        self._expected = None
        self._equal = self._differed = 0

    def _post(self, steps: int, parameters: Named) -> None:
        group = self._group
        names = [name for name, _ in parameters]
        prefix = f"replicas/{group.generation}/{label(names)}"
        mine = checksums(steps, (parameter for _, parameter in parameters))
        store: Any = group.store  # takes bytes as well as texts
        with suppress(RuntimeError):
            store.set(f"{prefix}/{group.rank}", mine.pack())
        if group.rank == 0:
            self._expected = steps, names, [f"{prefix}/{rank}" for rank in range(group.world_size)]
            self._tries = 0

    def _compare(self, counted: str, in_a_row: int) -> None:
        assert self._expected is not None
        steps, names, keys = self._expected
        self._tries += 1
        if self._tries == _TRIES:
            self._expected = None
        found = self._fetch(keys, steps)
        if len(found) < len(keys):
            return
        self._expected = None
        differs = difference(found, names)
        if differs is None:
            self._equal, self._differed = steps, 0
            return
        self._differed += 1
        if self._differed == 1:
            self._first = steps
        if self._differed >= in_a_row and not self._warned:
            self._warned = True
            get_notices("lockstep.replicas").warning(
                f"The weights are no longer the same on all ranks: after {self._first} {counted} {differs}; after "
                f"{self._equal} they were the same. From there on the ranks train different models. Look for an "
                "optimizer that was not passed to prepare() or steps on some ranks only, and for code that writes "
                "weights on one rank. To find the step, run with LOCKSTEP_REPLICA_CHECK_STEPS=1; then load a "
                "checkpoint from before it."
            )

    def _fetch(self, keys: list[str], steps: int) -> dict[int, Checksums]:
        """What has arrived of those keys."""
        with suppress(RuntimeError):  # whoever keeps the store has ended: the job learns of that elsewhere
            if self._group.store.check(keys):
                values = [Checksums.unpack(value) for value in self._group.store.multi_get(keys)]
                return {rank: sums for rank, sums in enumerate(values) if sums is not None and sums.steps == steps}
        return {}
