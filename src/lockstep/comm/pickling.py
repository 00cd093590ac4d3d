"""What becomes of an accelerator, or of a state, that is pickled.

A training script's arguments are kept with a state in them, and functions that use one are handed to other processes.

In a process that has this place in a job it is found again. Elsewhere it knows the place it was pickled at, and can do
nothing with the other ranks: joining the job once more, as another process under the same number, would break it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lockstep import current
from lockstep.process_group.child_process import DetachedProcessGroup
from lockstep.process_group.group import Group
from lockstep.topology.topology import Topology

if TYPE_CHECKING:
    from lockstep.comm.process_info import ProcessView

_SHOWN = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes", "device", "backend")


def taken_apart(view: ProcessView, number: int | None = None, precision: str | None = None) -> tuple[Any, ...]:
    """For pickle: the class, its place and, of several accelerators of a process, which one.

    What changes from start to start (a port, an attempt) is not in it: caches go by what is pickled.
    """
    place = {name: getattr(view._session.topology, name) for name in (*_SHOWN, "distributed_type", "launcher")}
    return put_together, (type(view), place, number, precision)


def put_together(cls: type[ProcessView], place: dict[str, Any], number: int | None, precision: str | None) -> Any:
    """What `taken_apart` was given, if it is this process's; else one that only knows its place."""
    session = current.peek()
    if session is not None and (session.topology.rank, session.topology.world_size) == (
        place["rank"],
        place["world_size"],
    ):
        found = cls._of_session(session, number)
        if found is not None:
            return found
    topology = Topology(**place, reason="it was pickled there", device_reason="it was pickled there")
    view = cls.__new__(cls)
    words = (
        f"this object was pickled in rank {topology.rank} of {topology.world_size} and unpickled in a process that is "
        "not this rank. It knows where it comes from (process_index, num_processes, device), and cannot work with the "
        "other ranks. Do that in the rank itself, and hand over what comes of it."
    )
    session = current.Session(
        topology=topology, group=cast(Group, DetachedProcessGroup(topology, words)), mixed_precision=precision
    )
    view._session = session
    return view
