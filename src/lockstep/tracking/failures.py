"""A tracker that fails is reported once and never stops the training."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from lockstep.errors import first_line
from lockstep.logging import get_notices
from lockstep.tracking.general import on_main_process


class TrackerFailures:
    """What one tracker could not do."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._first = ""

    def record(self, method: str, error: Exception) -> None:
        """A call failed: the first is logged, the others are counted."""
        self._count += 1
        if self._count > 1:
            return
        self._first = f"{method}() raised {type(error).__name__}: {first_line(error).rstrip('.')}"
        get_notices("lockstep.tracking").warning(
            "Tracker %r: %s. Training continues; what this call was to keep is not in the tracker. Further failures "
            "of this tracker are counted and reported at the end.",
            self._name,
            self._first,
            main_process_only=False,
        )

    def summarize(self) -> None:
        """The run has ended: log how much is missing."""
        if self._count > 1:
            get_notices("lockstep.tracking").warning(
                "Tracker %r: %d calls failed, so the run it shows is not complete. The first: %s.",
                self._name,
                self._count,
                self._first,
                main_process_only=False,
            )
        self._count = 0


def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a built-in tracker that runs on the main process and reports what it raises."""

    @on_main_process
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.failures.record(method.__name__, error)
            return None

    return call
