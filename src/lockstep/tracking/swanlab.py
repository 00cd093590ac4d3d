"""SwanLab."""

from __future__ import annotations

from typing import Any

from lockstep.tracking.failures import guarded
from lockstep.tracking.project_run import ProjectRunTracker


class SwanLabTracker(ProjectRunTracker):
    """A run of the project ``run_name``; further arguments are those of ``swanlab.init``."""

    name = "swanlab"

    @guarded
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Lists of images, each as ``swanlab.Image`` takes it."""
        self._log_images(values, step, kwargs)
