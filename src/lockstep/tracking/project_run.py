"""What wandb, SwanLab and Trackio have in common: a module with ``init`` and ``config``, and a run with ``log``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lockstep.tracking.built_in import BuiltInTracker
from lockstep.tracking.failures import guarded
from lockstep.tracking.general import on_main_process
from lockstep.tracking.values import scalars


class ProjectRunTracker(BuiltInTracker):
    """A run of the project ``run_name``; further arguments are those of the library's ``init``."""

    main_process_only = False
    _config_kwargs: Mapping[str, Any] = MappingProxyType({"allow_val_change": True})

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._kwargs = kwargs
        self._library: Any = None

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        self._library = importlib.import_module(self.name)
        self._run = self._library.init(project=self.run_name, **self._kwargs)

    @property
    def run(self) -> Any:
        """The run."""
        return self.tracker

    @guarded
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The run's config."""
        self._library.config.update(values, **self._config_kwargs)

    @guarded
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers, and whatever else the run's ``log`` takes."""
        self.run.log(scalars(values), step=step, **kwargs)

    def _log_images(self, values: dict[str, Any], step: int | None, kwargs: dict[str, Any]) -> None:
        for key, images in values.items():
            self.run.log({key: [self._library.Image(image) for image in images]}, step=step, **kwargs)

    def _end(self, run: Any) -> None:
        run.finish()
