"""TensorBoard."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep.host.packages import is_installed
from lockstep.tracking.built_in import BuiltInTracker
from lockstep.tracking.failures import guarded
from lockstep.tracking.general import on_main_process
from lockstep.tracking.values import flat, plain, report_left_out, scalars


class TensorBoardTracker(BuiltInTracker):
    """Writes event files to ``logging_dir/run_name``; further arguments are those of ``SummaryWriter``."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)
        self._kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Open an event file."""
        place = "torch.utils.tensorboard" if is_installed("tensorboard") else "tensorboardX"
        self._run = importlib.import_module(place).SummaryWriter(self.logging_dir, **self._kwargs)

    @property
    def writer(self) -> Any:
        """The ``SummaryWriter``."""
        return self.tracker

    @guarded
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters, flattened to ``a/b`` for TensorBoard, and as they are in ``hparams.yml``."""
        kept = plain(values)
        stamp = str(time.time())
        known = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in flat(kept).items()
        }
        self.writer.add_hparams(known, metric_dict={}, run_name=stamp)
        self.writer.flush()
        folder = Path(self.logging_dir, stamp)
        folder.mkdir(exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(kept, allow_unicode=True), encoding="utf-8")

    @guarded
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as scalars, texts as text, dicts of numbers as one chart."""
        for key, value in scalars(values).items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(key, value, global_step=step, **kwargs)
            else:
                report_left_out(self.name, key, value, "numbers, texts and dicts of numbers")
        self.writer.flush()

    @guarded
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Batches of images, as ``SummaryWriter.add_images`` takes them."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)
        self.writer.flush()

    def _end(self, run: Any) -> None:
        run.close()
