"""The import place that people know for prepared optimizers. Nothing lives here."""

from lockstep.optim.optimizer import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
