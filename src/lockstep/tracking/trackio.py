"""Trackio."""

from lockstep.tracking.project_run import ProjectRunTracker


class TrackioTracker(ProjectRunTracker):
    """A run of the project ``run_name``; further arguments are those of ``trackio.init``."""

    name = "trackio"
