"""Which monitors a training has: the one that is always on, and the detector where it was asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.config.choices import DebugTool, NanPolicy
from lockstep.config.recording import NumericsRecord
from lockstep.config.settings import Settings
from lockstep.numerics.policy import NanMonitor
from lockstep.optim.monitor import TrainingMonitor
from lockstep.training.state import TrainingState


def start_monitors(state: TrainingState, settings: Settings, folder: Path | None) -> None:
    """Have the training's numbers looked at as the settings want it; reports are kept in ``folder``."""
    if settings.nan_policy is not NanPolicy.OFF:
        state.monitor = NanMonitor(settings.nan_policy, state, folder)
    detect = DebugTool.UNDERFLOW_OVERFLOW in settings.debug
    if detect or settings.numerics_record is not None:
        state.detectors = Detectors(state, folder, settings.numerics_record, detect)


class Detectors(TrainingMonitor):
    """A detector on each prepared model."""

    def __init__(self, state: TrainingState, folder: Path | None, record: NumericsRecord | None, detect: bool) -> None:
        self._state, self._folder, self._record, self._detect = state, folder, record, detect
        self._attached: list[tuple[nn.Module, Any]] = []
        self._models = 0

    def follow(self, model: nn.Module, *, trained: bool) -> None:
        """Attach a detector."""
        from lockstep.numerics.reporting import attach_detector  # loaded where it is used: most runs do without

        record = _part(self._record, self._models)
        self._models += 1
        made = attach_detector(model, self._state, self._folder, record=record, detect=self._detect)
        self._attached.append((model, made))

    def retain(self, models: Iterable[nn.Module]) -> None:
        """Remove those of other models."""
        kept = {id(model) for model in models}
        for model, detector in self._attached:
            if id(model) not in kept:
                detector.remove()
        self._attached[:] = [pair for pair in self._attached if id(pair[0]) in kept]


def _part(record: NumericsRecord | None, number: int) -> NumericsRecord | None:
    """Where the trace of a job's first model goes, and that of a further one."""
    if record is None or number == 0:
        return record
    return NumericsRecord(
        path=str(Path(record.path) / f"model_{number}"),
        every=record.every,
        batches=record.batches,
        format=record.format,
    )
