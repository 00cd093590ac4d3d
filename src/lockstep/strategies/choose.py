"""Which strategy."""

from __future__ import annotations

from lockstep.config.settings import Settings
from lockstep.process_group.group import Group
from lockstep.strategies.base import Strategy
from lockstep.topology.topology import Topology


def choose(topology: Topology, group: Group, settings: Settings, asked: type[Strategy] | None = None) -> Strategy:
    """The strategy for this job: the one that was asked for, or else by the number of processes."""
    return (asked or kind_for(topology))(topology, group, settings)


def kind_for(topology: Topology) -> type[Strategy]:
    """How such a job trains."""
    if topology.world_size == 1:
        from lockstep.strategies.single import Single

        return Single
    from lockstep.strategies.ddp.strategy import DDP  # loaded where it is used: one process does without

    return DDP
