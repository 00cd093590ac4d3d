"""ClearML."""

from __future__ import annotations

from typing import Any

from lockstep.config import env
from lockstep.tracking.built_in import BuiltInTracker
from lockstep.tracking.failures import guarded
from lockstep.tracking.general import on_main_process
from lockstep.tracking.values import report_left_out, scalars

_SERIES = ("eval", "test", "train")


class ClearMLTracker(BuiltInTracker):
    """A task; further arguments are those of ``Task.init``. A task that the script has begun is used, and left open.

    CLEARML_PROJECT and CLEARML_TASK name the project and the task where the arguments do not.
    """

    name = "clearml"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs
        self._borrowed = False

    @on_main_process
    def start(self) -> None:
        """Begin the task."""
        from clearml import Task

        current = Task.current_task()
        self._borrowed = current is not None
        environ = env.snapshot()
        names = {
            "project_name": environ.get("CLEARML_PROJECT", self.run_name),
            "task_name": environ.get("CLEARML_TASK", self.run_name),
        }
        self._run = current or Task.init(**{**names, **self._kwargs})

    @property
    def task(self) -> Any:
        """The task."""
        return self.tracker

    @guarded
    def store_init_configuration(self, values: dict[str, Any]) -> Any:
        """The task's configuration."""
        return self.task.connect_configuration(values)

    @guarded
    def log(self, values: dict[str, int | float], step: int | None = None, **kwargs: Any) -> None:
        """Numbers: with a step as scalars, in the series that ``train_``, ``eval_`` or ``test_`` names; else alone."""
        logger = self.task.get_logger()
        for key, value in scalars(values).items():
            if not isinstance(value, (int, float)):
                report_left_out(self.name, key, value, "numbers")
            elif step is None:
                logger.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = _split(key)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @guarded
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Images, each as ``report_image`` takes it."""
        logger = self.task.get_logger()
        for key, image in values.items():
            title, series = _split(key)
            logger.report_image(title=title, series=series, iteration=step, image=image, **kwargs)

    @guarded
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """A table: column names and rows, or a dataframe."""
        if dataframe is None and data is None:
            raise TypeError("log_table() takes data= or dataframe=, and got neither")
        rows = None if data is None else [*([columns] if columns else []), *data]
        title, series = _split(table_name)
        self.task.get_logger().report_table(
            title=title,
            series=series,
            table_plot=rows if dataframe is None else dataframe,
            iteration=step,
            **kwargs,
        )

    def _end(self, run: Any) -> None:
        if not self._borrowed:
            run.close()


def _split(name: str) -> tuple[str, str]:
    """Title and series of a chart."""
    for series in _SERIES:
        if name.startswith(f"{series}_"):
            return name[len(series) + 1 :], series
    return name, "train"
