"""One process: nothing to average."""

from __future__ import annotations

from lockstep.strategies.base import Strategy
from lockstep.topology.topology import Topology


class Single(Strategy):
    """The model as it is."""

    @classmethod
    def reason(cls, topology: Topology) -> str:
        """What it does and why it is chosen for such a job, in a line."""
        return "one process, so the model is used as it is"
