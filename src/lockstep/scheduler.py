"""The import place that people know for prepared schedulers. Nothing lives here."""

from lockstep.optim.scheduler import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
