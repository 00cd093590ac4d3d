"""How the ranks tell each other how far a save has come: by a collective, or through the job's store.

A save in the background cannot use collectives: training's own are under way, in another order on each rank. Whoever
reaches the store's port can write to it, so what comes from there is data: JSON, signed, checked by whoever reads it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from lockstep.comm.objects import all_objects
from lockstep.errors import CheckpointError
from lockstep.guard.dead_peers import advise_on_dead, find_dead
from lockstep.process_group.group import Group

Exchange = Callable[[Any, str], list[Any]]
"""Called on: all ranks. Every rank's value, of what JSON knows, in rank order; the text says what for."""

_POLL = 0.02
_LOOK = 0.5
"""Seconds between two looks at whether the rank that is waited for lives."""


def by_collective(group: Group) -> Exchange:
    """Called on: all ranks, in the thread that trains."""

    return lambda value, doing: all_objects(group, value, doing)


class StoreExchange:
    """Through the job's store, on a connection of its own, beside whatever the ranks do meanwhile."""

    def __init__(self, group: Group, ticket: str) -> None:
        self._group = group
        self._store: Any = None
        self._prefix = f"checkpoint/{ticket}"
        self._turn = 0
        self._look_after = 0.0

    def __call__(self, value: Any, doing: str) -> list[Any]:
        """Called on: all ranks, in the thread that writes."""
        group = self._group
        if group.world_size == 1:
            return [value]
        if self._store is None:
            self._store = group.store.clone()
        self._turn += 1
        keys = [f"{self._prefix}/{self._turn}/{rank}" for rank in range(group.world_size)]
        self._store.set(keys[group.rank], json.dumps([value]))
        deadline = time.monotonic() + group.timeout.total_seconds()
        found = [self._wait(key, rank, deadline, doing) for rank, key in enumerate(keys)]
        # Every rank has answered here, so it has read all there was before: earlier turns, and earlier saves.
        self._store.delete_own("checkpoint/", but=(keys[group.rank],))
        return found

    def _wait(self, key: str, rank: int, deadline: float, doing: str) -> Any:
        # Asked again and again: torch's own wait prints a warning for each time that nothing came.
        while (found := self._store.peek(key, _read_value)) is None:
            time.sleep(_POLL)
            if self._group.leaving or time.monotonic() > deadline:
                raise CheckpointError(
                    f"While {doing}, rank {rank} did not answer: it has failed, is stuck, "
                    "or another process overwrites what it writes to the job's store."
                )
            self._raise_if_died(rank, doing)
        return found[0]

    def _raise_if_died(self, rank: int, doing: str) -> None:
        """A rank of this node that has died is seen by its black box; nobody is in a collective that would notice."""
        now = time.monotonic()
        if now < self._look_after:
            return
        self._look_after = now + _LOOK
        dead = [box for box in find_dead(self._group.boxes, self._group.rank) if box.rank == rank]
        if dead:
            raise CheckpointError(f"While {doing}, rank {rank} died.\n{advise_on_dead(dead, self._group.boxes)}")


def _read_value(data: bytes) -> tuple[Any]:
    (value,) = json.loads(data)
    return (value,)
