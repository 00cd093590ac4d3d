"""A model with one of each thing that files have to get right, and the ways in which it is saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WAYS: dict[str, dict[str, Any]] = {
    "safe-whole": {"safe_serialization": True},
    "safe-shards": {"safe_serialization": True, "max_shard_size": "1KB"},
    "safe-each": {"safe_serialization": True, "max_shard_size": 1},
    "torch-whole": {"safe_serialization": False},
    "torch-shards": {"safe_serialization": False, "max_shard_size": "1KB"},
}
"""How a model is saved: the arguments of ``save_model``, by the name of the folder."""


class Model(nn.Module):
    """A tie, buffers, bf16, fp16, a scalar and a tensor larger than a shard; the same values whoever makes it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(40, 8)
        self.block = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.thin = nn.Linear(8, 3, dtype=torch.bfloat16)
        self.thinner = nn.Linear(8, 2, dtype=torch.float16)
        self.scale = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(8, 40, bias=False)
        with torch.no_grad():
            for value in self.state_dict().values():
                value.copy_(torch.rand(value.shape, generator=generator) * 100)
        self.head.weight = self.embed.weight


def values(model: nn.Module) -> dict[str, str]:
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
        for name, tensor in model.state_dict().items()
    }
