"""What watches over a rank, as its process group sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.blackbox.box import NoBox
from lockstep.blackbox.snapshot import Snapshot
from lockstep.blackbox.step_clock import StepClock
from lockstep.rundir.crash_report import Advice


class Monitor:
    """Where this rank writes what it is doing, and what is known of the ranks beside it: nothing, without a guard."""

    def __init__(self) -> None:
        self.box: NoBox = NoBox()
        """Where this rank writes what it is doing."""
        self.boxes: Path | None = None
        """The folder in which the boxes of this node's ranks are."""
        self.clock: StepClock | None = None
        """When this rank got data and was in backward, for who looks for a straggler."""

    def find_dead(self) -> list[Snapshot]:
        """The boxes of ranks of this node that have died."""
        return []

    def find_left(self) -> list[Snapshot]:
        """The boxes of ranks of this node that came to the end of the script, and not to this rank's collective."""
        return []

    def advise_on_dead(self, dead: Sequence[Snapshot]) -> Advice:
        """Who died, what each was doing, what to do."""
        return Advice()

    def advise_on_left(self, left: Sequence[Snapshot], doing: str = "") -> Advice:
        """Who came to the end of the script, the likely cause, and what to do."""
        return Advice()
