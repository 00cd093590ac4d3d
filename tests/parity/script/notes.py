"""Writing down what a scenario saw, so that it reads the same from JSON; and a fresh accelerator for each one."""

from enum import Enum

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState


def fresh(**options):
    """An accelerator that does not know of the earlier ones; the process group stays."""
    AcceleratorState._reset_state()
    if hasattr(GradientState, "_reset_state"):
        GradientState._reset_state()
    return Accelerator(**options)


def attempt(scenario):
    """What a scenario returns, or the kind of error that it ended with."""
    try:
        return plain(scenario())
    except Exception as error:
        return {"raises": type(error).__name__, "bases": [base.__name__ for base in type(error).__mro__]}


def plain(value):
    """The value in JSON's types, with what JSON would lose: tuples, tensors, dtypes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().to(torch.float64) if value.is_floating_point() else value.detach()
        return {"tensor": flat.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, Enum):
        return {"enum": str(value.value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {type(value).__name__: [plain(item) for item in value]}
    if isinstance(value, (list, set)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"object": type(value).__name__}
