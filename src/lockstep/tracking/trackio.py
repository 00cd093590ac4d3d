"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lockstep.tracking.project_run import ProjectRunTracker


class TrackioTracker(ProjectRunTracker):
    """A run of the project ``run_name``; further arguments are those of ``trackio.init``."""

    name = "trackio"
    # Its config has no such option, and would store it as a setting of the run.
    _config_kwargs: Mapping[str, Any] = MappingProxyType({})
