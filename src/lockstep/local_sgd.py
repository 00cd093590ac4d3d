"""The import place that people know for local SGD. Nothing lives here."""

from lockstep.training.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
