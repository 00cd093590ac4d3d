"""A small model with tied weights, buffers, a parameter of its own and a module that is used without being called."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """Uses its projection's weight without calling it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + nn.functional.linear(values, self.proj.weight, self.proj.bias)


class Body(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.randn(width))
        self.register_buffer("shift", torch.randn(width), persistent=False)

    def forward(self, values: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        hidden = self.up(self.norm(values) * self.scale + self.shift).relu()
        return values + factor * self.down(hidden)


class Net(nn.Module):
    def __init__(self, width: int = 160, words: int = 120) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Body(width) for _ in range(3))
        self.attention = Attention(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.randn(width))

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        values = self.embed(words)
        for block in self.blocks:
            values = block(values, factor=0.5)
        return {"logits": self.head(self.attention(values) * self.gain), "words": words}


def net() -> Net:
    torch.manual_seed(1)
    model = Net().eval()
    for block in model.blocks:
        block.norm.running_mean.normal_()
    return model


WORDS = torch.arange(12)
