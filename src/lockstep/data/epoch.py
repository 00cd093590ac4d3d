"""Which epoch a loader is in, and where in it: shared with the loaders that skip some of its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.data.iteration import Iteration


class Epoch:
    """The epochs of a loader, and its iterations.

    An epoch is over when an iteration that began in it is exhausted. One that is left early, or only looked at, does
    not count; of several that were open at the same time only the first that ends does.
    """

    def __init__(self, number: int = 0, audited: bool = False) -> None:
        self.number = number
        self.audited = audited
        self._live: dict[int, Iteration] = {}
        """Iterations that have begun and not ended, by id. Changed by single calls, as threads may draw."""
        self._latest: Iteration | None = None
        """The iteration that ended last."""
        self.trains = False
        """Whether any of its batches has been trained on."""
        self._left: Iteration | None = None
        """An iteration that was left before its end."""

    def __reduce__(self) -> tuple[type[Epoch], tuple[int, bool]]:
        return Epoch, (self.number, self.audited)  # a copy of a loader has iterations of its own

    @property
    def newest(self) -> Iteration | None:
        """The iteration that drew last, of those that are open."""
        return max(list(self._live.values()), key=lambda one: one.drawn_at, default=None)

    @property
    def shown(self) -> Iteration | None:
        """The same, or else the one that ended last."""
        return self.newest or self._latest

    def place(self, trains: bool) -> Iteration | None:
        """The iteration that says where the loader stands: the one that is trained on, or was until it was left.

        One that nobody trained on does while it is open; and after it was left, unless the script trains at all
        (``trains``): then it was only looked at. None between epochs.
        """
        left, live = self._left, [one for one in list(self._live.values()) if not one.superseded]
        if left is not None and trains and not left.trained:
            left = None
        found = [one for one in live if one.trained] or [one for one in live if left is None or one.is_after(left)]
        return max(found, key=lambda one: one.drawn_at, default=left)

    def begins(self, iteration: Iteration) -> None:
        """An iteration begins."""
        iteration.number = self.number
        self._live[id(iteration)] = iteration

    def ends(self, iteration: Iteration, exhausted: bool) -> None:
        """An iteration is exhausted, or was left."""
        self._live.pop(id(iteration), None)
        self._latest = iteration
        if exhausted:
            self._left = None
            self.number += iteration.number == self.number
        elif not iteration.superseded and (iteration.trained or self._left is None or not self._left.trained):
            self._left = iteration

    def restored(self) -> None:
        """A state was loaded: it says where the loader stands, and what is open does so no more."""
        self._left = None
        for one in list(self._live.values()):
            one.superseded = True
