"""Processes that have a rank's place, or even its memory, and are not the rank.

A rank starts workers of its own: by fork they have a copy of everything, its sockets included; by spawn, the variables
that say which rank it is. Whatever such a process does with the other ranks is done in the rank's name behind its back:
they hang, and nobody can say why. So it knows its place, and everything beyond that says what is wrong.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from lockstep.errors import UsageError
from lockstep.host.python_objects import keep_forever, turn_into
from lockstep.topology.topology import Topology

VARIABLE = "LOCKSTEP_RANK_PROCESS"
"""Set by a rank for the processes that it starts: its process, and its place in which job."""


class DetachedProcessGroup:
    """In the place of the group, where it cannot be used."""

    def __init__(self, topology: Topology, words: str) -> None:
        self.backend = topology.backend
        self.debug = False
        self.away = words
        """Why nothing else is here."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or name == "away":
            raise AttributeError(name)
        raise UsageError(self.away[0].upper() + self.away[1:])


def _words(start: str) -> str:
    return (
        f"{start}, and is not a rank itself. It knows its place (process_index, num_processes, device), and cannot "
        "work with the other ranks. Do that in the rank, and hand over what comes of it"
    )


def announce(topology: Topology) -> dict[str, str]:
    """The variable that tells processes which this rank starts what they are."""
    return {VARIABLE: f"{os.getpid()} {_job(topology)}"}


def _job(topology: Topology) -> str:
    place = f"{topology.rank}/{topology.world_size}"
    return f"{place} {topology.main_address}:{topology.main_port} {topology.attempt}"


def started_by_a_rank(topology: Topology, announced: str | None) -> str:
    """Why this process is not the rank that its variables say; empty when it is."""
    pid, _, job = (announced or "").partition(" ")
    if not pid.isdecimal() or int(pid) == os.getpid() or job != _job(topology):
        return ""
    start = f"this process ({os.getpid()}) was started by rank {topology.rank} (process {pid})"
    return (
        f"{_words(start)}. If it is a worker that runs the script once more, put what the script does below "
        "`if __name__ == '__main__':`."
    )


def become(group: Any, topology: Topology, parent: int, *more: Any) -> None:
    """In a child made by fork: have the group, which is its parent's, say so; ``more`` is its parent's too."""
    start = f"this process ({os.getpid()}) was forked by rank {topology.rank} (process {parent})"
    # Never to be destroyed here: what waits for threads that only the parent has would wait for ever.
    for owned in (dict(group.__dict__), group.pg, *more):
        keep_forever(owned)
    turn_into(group, DetachedProcessGroup(topology, f"{_words(start)}."))
