"""torch.profiler with the options of ``ProfileKwargs``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lockstep.config.handlers import ProfileKwargs


@contextmanager
def profiler(options: ProfileKwargs, rank: int) -> Iterator[Any]:
    """Record the block; each rank writes its own trace where a folder was given."""
    schedule = options.schedule_option
    with torch.profiler.profile(
        activities=_activities(options.activities),
        schedule=None if schedule is None else torch.profiler.schedule(**schedule),
        on_trace_ready=options.on_trace_ready,
        record_shapes=options.record_shapes,
        profile_memory=options.profile_memory,
        with_stack=options.with_stack,
        with_flops=options.with_flops,
        with_modules=options.with_modules,
    ) as recording:
        yield recording
    if options.output_trace_dir is not None:
        folder = Path(options.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(str(folder / f"profile_{rank}.json"))


def _activities(names: list[str] | None) -> list[Any] | None:
    if names is None:
        return None
    return [torch.profiler.ProfilerActivity.__members__[name.upper()] for name in names]
