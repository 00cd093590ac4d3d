"""The trackers of one Accelerator: starting them, logging to all, ending them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import ConfigError
from lockstep.logging import get_notices
from lockstep.topology.topology import Topology
from lockstep.tracking.built_in import BuiltInTracker
from lockstep.tracking.failures import TrackerFailures
from lockstep.tracking.general import GeneralTracker
from lockstep.tracking.registry import LOGGER_TYPE_TO_CLASS, Chosen, filter_trackers, require_packages, tracker_name

_logger = get_notices("lockstep.tracking")


def choose_trackers(log_with: Any, logging_dir: str | None) -> JobTrackers:
    """The trackers that were asked for, not running yet."""
    chosen = filter_trackers(log_with, logging_dir)
    if log_with and not chosen:
        _logger.warning("log_with=%r: no tracker's package is installed, so nothing is logged.", log_with)
    return JobTrackers(chosen, logging_dir)


class JobTrackers:
    """Logs to each tracker on the main process; other processes do nothing.

    A tracker that cannot start is left out with a warning, one that fails later is reported once.
    """

    def __init__(self, chosen: Sequence[Chosen], logging_dir: str | None) -> None:
        self.chosen = list(chosen)
        self.running: list[GeneralTracker] = []
        """What runs in this process; empty on other processes than the main one."""
        self._logging_dir = logging_dir
        self._dropped: list[str] = []
        self._state = "init_trackers() has not been called"
        """Why nothing is logged; empty while trackers run."""
        self._failures: dict[int, TrackerFailures] = {}

    def check(self, topology: Topology) -> None:
        """Refuse what the main process has no package for."""
        if topology.is_main:
            require_packages(self.chosen)

    def start(
        self, project_name: str, config: Mapping[str, Any] | None, init_kwargs: Mapping[str, Mapping[str, Any]] | None
    ) -> None:
        """Called on: the main process. Make and start each tracker, and keep the run's settings."""
        made = [self._make(item, project_name, init_kwargs or {}) for item in self.chosen]
        before = self._end_made() if not self._state else []
        self.running, self._dropped, self._state = [], [], ""
        for tracker in made:
            if any(tracker is other for other in before) or self._starts(tracker):
                self.running.append(tracker)
        if config is not None:
            for tracker in self.running:
                self._call(tracker, "store_init_configuration", config)

    def _end_made(self) -> list[GeneralTracker]:
        """End the runs of an earlier call. Trackers that the user made go on; gives those."""
        own = [tracker for tracker in self.running if any(tracker is item for item in self.chosen)]
        for tracker in self.running:
            if tracker not in own:
                self._finish(tracker)
        return own

    def _make(self, item: Chosen, project_name: str, init_kwargs: Mapping[str, Mapping[str, Any]]) -> GeneralTracker:
        if isinstance(item, GeneralTracker):
            return item
        kind: Any = LOGGER_TYPE_TO_CLASS[str(item)]
        folder = (self._logging_dir,) if kind.requires_logging_directory else ()
        kwargs = init_kwargs.get(str(item), {})
        try:
            return kind(project_name, *folder, **kwargs)
        except TypeError as error:
            raise ConfigError(
                f"init_kwargs[{str(item)!r}]={dict(kwargs)!r} does not fit {kind.__name__}: {error}"
            ) from None

    def _starts(self, tracker: GeneralTracker) -> bool:
        name = tracker_name(tracker)
        try:
            tracker.start()
        except TypeError as error:  # arguments that the library does not have: no network mends that
            raise ConfigError(f"Tracker {name!r} cannot be started with these init_kwargs: {error}") from error
        except Exception as error:
            self._dropped.append(name)
            self._failures_of(tracker).record("start", error)
            return False
        return True

    def log(
        self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Mapping[str, Any]] | None
    ) -> None:
        """Called on: the main process. Hand the values to each tracker."""
        if self._state and self.chosen:
            _logger.warning_once("log(): %s, so nothing is logged.", self._state)
            return
        for tracker in self.running:
            self._call(tracker, "log", values, step=step, **(log_kwargs or {}).get(tracker_name(tracker), {}))

    def get(self, name: str, unwrap: bool) -> Any:
        """A running tracker, or with ``unwrap`` what it logs with. Where none runs, one that does nothing."""
        for tracker in self.running:
            if tracker_name(tracker) == name:
                return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]
        if name in self._dropped:
            return SilentTracker()
        if self.running:
            names = ", ".join(repr(tracker_name(tracker)) for tracker in self.running)
            raise ConfigError(f"get_tracker({name!r}): there is no tracker of that name. Running: {names}.")
        return GeneralTracker(_blank=True)

    def finish(self) -> None:
        """End each tracker, and report what could not be logged."""
        if self._state:
            return
        self._state = "end_training() has been called"
        for tracker in self.running:
            self._finish(tracker)

    def _finish(self, tracker: GeneralTracker) -> None:
        self._call(tracker, "finish")
        self._failures_of(tracker).summarize()

    def _call(self, tracker: GeneralTracker, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(tracker, method)(*args, **kwargs)
        except Exception as error:
            self._failures_of(tracker).record(method, error)

    def _failures_of(self, tracker: GeneralTracker) -> TrackerFailures:
        if isinstance(tracker, BuiltInTracker):
            return tracker.failures
        return self._failures.setdefault(id(tracker), TrackerFailures(tracker_name(tracker)))


class SilentTracker:
    """Stands in for a tracker that could not start, and for its library's run: takes every call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> SilentTracker:  # noqa: D102 - the class says it
        return self

    def __getitem__(self, key: Any) -> SilentTracker:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        return None

    def __enter__(self) -> SilentTracker:
        return self

    def __exit__(self, *exception: object) -> None:
        return None
