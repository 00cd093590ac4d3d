"""The import place that people know for the detector of underflow and overflow."""

from lockstep.numerics.detector import DebugUnderflowOverflow
from lockstep.numerics.precision import run_in_fp32
from lockstep.numerics.stats import detect_overflow

__all__ = ["DebugUnderflowOverflow", "detect_overflow", "run_in_fp32"]
