"""When a rank got data and was in backward: what the guard finds stragglers by."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_KEPT = 64
_SAMPLES = 20
"""Looks at the workers from which on the share of time that they are busy is known well enough."""


class StepClock:
    """When this rank asked for data and got it, entered backward and left it: its latest steps while it is on."""

    __slots__ = ("backwards", "busy", "fetches", "on", "workers")

    def __init__(self) -> None:
        self.on = False
        """Whether the loop is to note its times: now and then is enough."""
        self.fetches: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        """When the loader was asked, and when it answered."""
        self.backwards: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        """When a backward that averages gradients was entered and left."""
        self.workers: Callable[[], float] | None = None
        """What gives the share of the loader's worker processes that are busy; None where this rank reads by itself."""
        self.busy: deque[float] = deque(maxlen=_KEPT)
        """These shares, at moments that have nothing to do with the steps."""

    def sample(self) -> None:
        """Look at the workers."""
        workers = self.workers
        if workers is not None:
            self.busy.append(workers())
        elif self.busy:
            self.busy.popleft()  # of an epoch that has ended

    def busy_share(self) -> float:
        """The share of their time that the workers are busy: 0 without any, all of it while that is not known."""
        if len(self.busy) >= _SAMPLES:
            return sum(self.busy) / len(self.busy)
        return 1.0 if self.busy or self.workers is not None else 0.0
