"""What every experiment tracker is, and the decorator that keeps its methods on the main process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from lockstep import current
from lockstep.errors import IncompleteTracker

REQUIRED = ("name", "requires_logging_directory", "tracker")
"""What a tracker's class defines."""


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """A tracker's method that does nothing on other processes than the main one, if ``main_process_only`` is True."""

    @wraps(function)
    def on_main_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and current.placement().rank != 0:
            return None
        return function(self, *args, **kwargs)

    return on_main_only


class GeneralTracker:
    """The base of all trackers, yours included.

    A class of yours defines three things, as attributes or properties:

    name: The name for ``get_tracker``.
    requires_logging_directory: Whether it writes to a folder of the project.
    tracker: What it logs with, such as the run of its library.

    ``Accelerator(log_with=MyTracker(…))`` calls its methods on the main process. ``main_process_only=False`` is for
    trackers whose methods you call yourself on every process.
    """

    main_process_only = True
    """Whether methods with `on_main_process` do nothing elsewhere."""

    def __init__(self, _blank: bool = False) -> None:
        missing = [] if _blank else missing_attributes(self)
        if missing:
            raise incomplete(type(self), missing)

    def start(self) -> None:
        """Begin the run; called once, by ``init_trackers``."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep these values, for this step."""

    def finish(self) -> None:
        """End the run; called by ``end_training``."""


def missing_attributes(tracker: Any) -> list[str]:
    """What this tracker does not define. Nothing is read: ``tracker`` may exist only after ``start``."""
    return [name for name in REQUIRED if name not in dir(tracker)]


def incomplete(kind: type, missing: list[str]) -> IncompleteTracker:
    """The error for a tracker's class that is not whole."""
    return IncompleteTracker(
        f"The tracker class {kind.__name__} does not define {', '.join(missing)}. Every tracker has "
        f"{', '.join(REQUIRED)}, as attributes or properties."
    )
