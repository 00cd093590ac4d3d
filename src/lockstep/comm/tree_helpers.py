"""Small questions about nested structures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.trees import find_batch_size, flatten, recursively_apply


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(tensor, Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether it is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """These values in a list or tuple of the same type as ``obj``."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor; None when there is none."""
    return next((leaf.device for leaf in flatten(data)[0] if isinstance(leaf, Tensor)), None)


def listify(data: Any) -> Any:
    """The structure with plain numbers and lists in place of tensors."""
    return recursively_apply(_to_list, data)


def ignorant_find_batch_size(data: Any) -> int | None:
    """As ``find_batch_size``, and None where that raises."""
    try:
        return find_batch_size(data)
    except (TypeError, ValueError):
        return None


def _to_list(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).tolist()
