"""An accelerator's part in watching numbers: what it hands to the tools of this package, and when it calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.config.choices import DebugTool, NanPolicy
from lockstep.config.recording import NumericsRecord
from lockstep.numerics.policy import MonitorContext, NanMonitor
from lockstep.process_group.group import Group


class MonitorMethods:
    """Models whose numbers are watched: by the tier that is always on, and by the detector where it was asked for."""

    _watch: NanMonitor | None = None
    """None when nobody looks."""
    _detector: Callable[[nn.Module], Any] | None = None
    """Puts the detector on a model; None when nobody asked for it."""
    _detectors: list[tuple[nn.Module, Any]]

    def _start_watching(
        self,
        group: Group,
        policy: NanPolicy,
        tools: frozenset[DebugTool],
        record: NumericsRecord | None,
        *,
        scaled: bool,
        around: MonitorContext,
    ) -> None:
        self._detectors = []
        if policy is not NanPolicy.OFF:
            self._watch = NanMonitor(policy, group, around, scaled=scaled)
        if DebugTool.UNDERFLOW_OVERFLOW in tools or record is not None:

            def enable_detector(model: nn.Module) -> Any:
                from lockstep.numerics.reporting import attach_detector  # loaded where it is used: most runs do without

                return attach_detector(
                    model,
                    group,
                    lambda: around.spell(around.samples()),
                    around.folder,
                    record=_part(record, number()),
                    detect=DebugTool.UNDERFLOW_OVERFLOW in tools,
                )

            number = iter(range(1 << 30)).__next__
            self._detector = enable_detector

    @property
    def _gate(self) -> NanMonitor | None:
        """Who may refuse updates, or is to know of those that the loss scaler drops; None when there is nobody."""
        return self._watch if self._watch is not None and self._watch.guards else None

    def _watch_model(self, model: nn.Module, *, trained: bool) -> None:
        if self._detector is not None:
            self._detectors.append((model, self._detector(model)))
        if self._watch is not None and trained:
            self._watch.follow(model)

    def _watch_only(self, models: list[nn.Module]) -> None:
        """Forget all other models: what an attempt that ran out of memory held is to be freed."""
        if self._watch is not None:
            self._watch.retain(models)
        kept = [pair for pair in self._detectors if any(pair[0] is model for model in models)]
        for pair in self._detectors:
            if pair not in kept:
                pair[1].remove()
        self._detectors[:] = kept

    def _stop_watching(self) -> None:
        for _, detector in self._detectors:
            detector.remove()
        self._detectors.clear()
        if self._watch is not None:
            self._watch.close()


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
