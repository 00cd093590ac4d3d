"""How the ranks tell each other how far a save has come: by a collective, or through the job's store.

A save in the background cannot use collectives: training's own are under way, in another order on each rank. Whoever
reaches the store's port can write to it, so what comes from there is data: JSON, checked by whoever reads it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from lockstep.comm.objects import all_objects
from lockstep.errors import CheckpointError
from lockstep.topology.group import Group

Exchange = Callable[[Any, str], list[Any]]
"""Called on: all ranks. Every rank's value, of what JSON knows, in rank order; the text says what for."""

_POLL = 0.02


def by_collective(group: Group) -> Exchange:
    """Called on: all ranks, in the thread that trains."""

    return lambda value, doing: all_objects(group, value, doing)


class StoreExchange:
    """Through the job's store, on a connection of its own, beside whatever the ranks do meanwhile."""

    def __init__(self, group: Group, ticket: str) -> None:
        self._group = group
        self._store: Any = group.store.clone() if group.world_size > 1 else None  # type: ignore[attr-defined]
        self._prefix = f"checkpoint/{ticket}"
        self._turn = 0

    def __call__(self, value: Any, doing: str) -> list[Any]:
        """Called on: all ranks, in the thread that writes."""
        group = self._group
        if group.world_size == 1:
            return [value]
        self._turn += 1
        keys = [f"{self._prefix}/{self._turn}/{rank}" for rank in range(group.world_size)]
        self._store.set(keys[group.rank], json.dumps(value))
        deadline = time.monotonic() + group.timeout.total_seconds()
        for rank, key in enumerate(keys):
            self._wait(key, rank, deadline, doing)
        found = [self._read(key, rank, doing) for rank, key in enumerate(keys)]
        self._forget(keys)
        return found

    def _read(self, key: str, rank: int, doing: str) -> Any:
        try:
            return json.loads(self._store.get(key))
        except (ValueError, RecursionError):
            raise CheckpointError(
                f"While {doing}, the job's store held something else in the place of rank {rank}'s answer. Is another "
                "process writing to it?"
            ) from None

    def _wait(self, key: str, rank: int, deadline: float, doing: str) -> None:
        # Asked again and again: torch's own wait prints a warning for each time that nothing came.
        while not self._store.check([key]):
            time.sleep(_POLL)
            if self._group.leaving or time.monotonic() > deadline:
                raise CheckpointError(f"While {doing}, rank {rank} did not answer: it has failed, or is stuck.")

    def _forget(self, keys: list[str]) -> None:
        """Remove the answers once every rank has read them."""
        readers = f"{self._prefix}/{self._turn}/readers"
        if self._store.add(readers, 1) == self._group.world_size:
            for key in (*keys, readers):
                self._store.delete_key(key)
