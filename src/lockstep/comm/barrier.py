"""Waiting for everyone."""

from __future__ import annotations

from lockstep.comm import verify
from lockstep.process_group.group import Group


def barrier(group: Group) -> None:
    """Called on: all ranks. Wait until every rank is here; in debug mode, first make sure that all mean to."""
    if group.world_size == 1:
        return
    number = group.box.enter("wait_for_everyone", None, 2)
    try:
        if group.debug:
            verify.check(
                group, verify.CollectiveSignature(operation="wait_for_everyone")
            )  # nobody comes out before all are in
        else:
            group.barrier()
    finally:
        group.box.leave(number)
