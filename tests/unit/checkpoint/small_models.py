"""Models that hold one of each thing that files have to get right."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """Input and output embedding are one tensor; there is a norm with buffers, and a weight in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.thin = nn.Linear(8, 3, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        for buffer in self.norm.buffers():
            buffer.copy_(torch.randint(1, 9, buffer.shape))


def on_meta() -> Tied:
    model = Tied()
    model.to("meta")
    model.head.weight = model.embed.weight
    return model


def bits(tensor: Tensor) -> bytes:
    """All that there is to a tensor's values, NaNs included."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_values(left: nn.Module, right: nn.Module) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return list(ours) == list(theirs) and all(
        (ours[name].dtype, ours[name].shape, bits(ours[name]))
        == (theirs[name].dtype, theirs[name].shape, bits(theirs[name]))
        for name in ours
    )
