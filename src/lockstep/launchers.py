"""The import place that people know for starting ranks from Python. Nothing lives here."""

from lockstep.launch.notebook import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
