"""Comet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.tracking.built_in import BuiltInTracker
from lockstep.tracking.failures import guarded
from lockstep.tracking.general import on_main_process
from lockstep.tracking.values import report_left_out, scalars


class CometMLTracker(BuiltInTracker):
    """An experiment of the project ``run_name``; further arguments are those of ``comet_ml.start`` (3.41 or newer)."""

    name = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Begin the experiment."""
        import comet_ml

        self._run = comet_ml.start(project_name=self.run_name, **self._kwargs)

    @property
    def writer(self) -> Any:
        """The experiment."""
        return self.tracker

    @guarded
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The experiment's parameters."""
        self.writer.log_parameters(values)

    @guarded
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers and dicts of numbers as metrics, texts beside them."""
        if step is not None:
            self.writer.set_step(step)
        for key, value in scalars(values).items():
            if isinstance(value, (int, float)):
                self.writer.log_metric(key, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(key, value, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.log_metrics(value, step=step, **kwargs)
            else:
                report_left_out(self.name, key, value, "numbers, texts and dicts of numbers")

    def _end(self, run: Any) -> None:
        run.end()
