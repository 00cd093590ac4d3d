"""DVCLive."""

from __future__ import annotations

from typing import Any

from lockstep.tracking.built_in import BuiltInTracker
from lockstep.tracking.failures import guarded
from lockstep.tracking.general import on_main_process
from lockstep.tracking.values import report_left_out, scalars


class DVCLiveTracker(BuiltInTracker):
    """A ``Live`` of yours, or a new one with these arguments. Each ``log`` is one of its steps."""

    name = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._given = live
        self._kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Begin to log."""
        from dvclive import Live

        self._run = Live(**self._kwargs) if self._given is None else self._given

    @property
    def live(self) -> Any:
        """The ``Live``."""
        return self.tracker

    @guarded
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The parameters."""
        self.live.log_params(values)

    @guarded
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and texts, as ``log_metric`` takes them."""
        from dvclive.plots import Metric

        if step is not None:
            self.live.step = step
        for key, value in scalars(values).items():
            if Metric.could_log(value):
                self.live.log_metric(key, value, **kwargs)
            else:
                report_left_out(self.name, key, value, "numbers and texts")
        self.live.next_step()

    def _end(self, run: Any) -> None:
        run.end()
