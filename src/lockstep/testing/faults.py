"""Faults for a rank to commit, at a place a test chooses."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn


def die(how: signal.Signals | int) -> NoReturn:
    """End this process now, without clean-up: by a signal (``signal.SIGKILL``), or by exit code (``3``)."""
    if not isinstance(how, signal.Signals):
        os._exit(how)
    os.kill(os.getpid(), how)
    while True:  # a signal may take effect a moment later
        time.sleep(0.01)


def stall(seconds: float) -> None:
    """Do nothing for a while, as a rank with a slow disk or a long evaluation does."""
    time.sleep(seconds)


@dataclass(frozen=True)
class FaultPlan:
    """One fault: what one rank does when it reaches one step.

    ``FaultPlan(1, 3, functools.partial(die, signal.SIGKILL))`` travels to the ranks as an argument; there each step of
    the loop calls ``plan.reached(rank, step)``.
    """

    rank: int
    """The rank that fails."""
    step: int
    """The step at which it fails."""
    action: Callable[[], object]
    """What it does then; picklable."""

    def reached(self, rank: int, step: int) -> None:
        """Commit the fault if this is the rank and the step."""
        if (rank, step) == (self.rank, self.step):
            self.action()
