"""Aim."""

from __future__ import annotations

import os
from typing import Any

from lockstep.tracking.built_in import BuiltInTracker
from lockstep.tracking.failures import guarded
from lockstep.tracking.general import on_main_process
from lockstep.tracking.values import report_left_out, scalars


class AimTracker(BuiltInTracker):
    """A run called ``run_name`` in the repository ``logging_dir``; further arguments are those of ``aim.Run``."""

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = logging_dir
        self._kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        from aim import Run

        self._run = Run(repo=self.aim_repo_path, **self._kwargs)
        self._run.name = self.run_name

    @property
    def writer(self) -> Any:
        """The run."""
        return self.tracker

    @guarded
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The run's ``hparams``."""
        self.writer["hparams"] = values

    @guarded
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers, and whatever else ``run.track`` takes."""
        for key, value in scalars(values).items():
            if value is None or isinstance(value, str):
                report_left_out(self.name, key, value, "numbers and its own objects")
            else:
                self.writer.track(value, name=key, step=step, **kwargs)

    @guarded
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Images, or pairs of an image and its caption.

        ``kwargs={"aim_image": …, "track": …}`` are further arguments of ``aim.Image`` and of ``run.track``.
        """
        import aim

        options = kwargs or {}
        for key, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            picture = aim.Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(picture, name=key, step=step, **options.get("track", {}))

    def _end(self, run: Any) -> None:
        run.close()
