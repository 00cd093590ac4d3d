"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from lockstep.tracking.failures import guarded
from lockstep.tracking.project_run import ProjectRunTracker


class WandBTracker(ProjectRunTracker):
    """A run of the project ``run_name``; further arguments are those of ``wandb.init``."""

    name = "wandb"

    @guarded
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Lists of images, each as ``wandb.Image`` takes it."""
        self._log_images(values, step, kwargs)

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
        table = self._library.Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)
