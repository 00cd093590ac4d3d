"""The batch being worked on: which iteration it came from, and which iteration the training follows.

A script may have several iterations open at once: an evaluation inside the training loop, a batch that was only looked
at, two loaders side by side. Metrics are about the batch that was drawn last. Accumulation windows end with the loader
that is trained on, whatever else has been drawn meanwhile.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from lockstep.data.global_batch import GlobalBatch
    from lockstep.data.iteration import Iteration

_numbers = itertools.count()
_known: WeakValueDictionary[tuple[int, int], CurrentBatch] = WeakValueDictionary()
"""Those of this process, so that a copy of a loader finds its own again."""


class CurrentBatch:
    """What one accelerator's loaders have handed out."""

    def __init__(self) -> None:
        self._key = os.getpid(), next(_numbers)
        _known[self._key] = self
        self._live: dict[int, Iteration] = {}
        """Iterations by id. Changed by single calls, as a script may draw in several threads."""
        self._draws = 0
        self._draws_trained = 0
        """Draws up to the last backward."""
        self._leader: Iteration | None = None
        """The iteration that the last backward was about."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, self._key

    # --- what the iterations report ----------------------------------------------------------------------------

    def drew(self, iteration: Iteration) -> None:
        """An iteration hands out a batch: the newest is now this one's."""
        self._draws += 1
        iteration.drawn_at = self._draws
        iteration.begun_at = iteration.begun_at or self._draws
        self._live.pop(id(iteration), None)
        self._live[id(iteration)] = iteration

    def ended(self, iteration: Iteration) -> None:
        """An iteration is exhausted, closed or collected."""
        self._live.pop(id(iteration), None)

    def clear(self) -> None:
        """Forget all of them."""
        self._live.clear()
        self._leader = None

    # --- what the training reports -----------------------------------------------------------------------------

    def trained(self) -> None:
        """A backward, or a step of an optimizer, has used what was drawn since the one before."""
        if self._draws_trained == self._draws:
            return
        iteration = self.training
        self._draws_trained = self._draws
        if iteration is not None:
            self._leader = iteration
            iteration.trained = iteration.epoch.trains = True

    # --- who is who --------------------------------------------------------------------------------------------

    def awaits_training(self, iteration: Iteration) -> bool:
        """Whether an iteration that is trained on has handed out a batch since the last backward."""
        return iteration.trained and iteration.drawn_at > self._draws_trained

    @property
    def trains(self) -> bool:
        """Whether anything that was drawn has been trained on."""
        return self._leader is not None

    @property
    def live(self) -> list[Iteration]:
        """Iterations that have begun and not ended, the one that drew last at the end."""
        return list(self._live.values())

    @property
    def newest(self) -> Iteration | None:
        """The iteration that drew last, of those that are still open: metrics are about its batch."""
        live = self.live
        return live[-1] if live else None

    @property
    def training(self) -> Iteration | None:
        """The iteration whose batches are trained on."""
        live = self.live
        if len(live) < 2:
            return live[0] if live else None
        candidates = [one for one in live if one.drawn_at > self._draws_trained] or live
        leader = self._leader
        if leader is not None:
            if any(one is leader for one in candidates):
                return leader
            candidates = [one for one in candidates if one.epoch is leader.epoch] or candidates
        # Before the first backward the outermost is the likely one; one that is at its end would close the window.
        return min(candidates, key=lambda one: (one.end_of_dataloader, one.begun_at))

    @property
    def round(self) -> GlobalBatch | None:
        """What all ranks hold of the batch that is trained on; None when no prepared loader is being iterated."""
        iteration = self.training
        return None if iteration is None else iteration.round


def _find(process: int, number: int) -> CurrentBatch:
    return _known.get((process, number)) or CurrentBatch()
