"""The import place that people know for versions. Nothing lives here."""

from lockstep.host.packages import (
    compare_versions,
    is_torch_version,
)

__all__ = [
    "compare_versions",
    "is_torch_version",
]
