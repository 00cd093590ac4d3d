"""The memory of a tensor, as bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat tensor of bytes, which shares it.

    A tensor of one element is contiguous whatever its strides are, but torch views it as bytes with a stride of 1 only.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
