"""What the built-in trackers have in common."""

from __future__ import annotations

from typing import Any

from lockstep.errors import UsageError
from lockstep.tracking.failures import TrackerFailures, guarded
from lockstep.tracking.general import GeneralTracker


class BuiltInTracker(GeneralTracker):
    """A tracker of a known library: made by name, started on the main process, guarded against failures."""

    name: str
    """The name in ``log_with``."""
    requires_logging_directory: bool = False
    """Whether the second argument is the folder for logs."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = TrackerFailures(self.name)
        self._run: Any = None

    @property
    def tracker(self) -> Any:
        """What the library logs with."""
        if self._run is None:
            raise UsageError(
                f"Tracker {self.name!r} is not running. init_trackers() starts it, or start() where it was made by "
                "hand; end_training() ends it."
            )
        return self._run

    @guarded
    def finish(self) -> None:
        """End the run; what is on its way is stored first."""
        run, self._run = self._run, None
        if run is not None:
            self._end(run)

    def _end(self, run: Any) -> None:
        """End the library's run."""
        raise NotImplementedError
