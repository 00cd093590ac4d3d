"""Random trees of modules on the meta device, with limits, for device maps."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st
from torch import nn


class Block(nn.Module):
    """A module with children."""


class Whole(Block):
    """One that the tests do not split."""


def _leaf(draw: st.DrawFn) -> nn.Module:
    kind = draw(st.sampled_from(("linear", "norm", "embedding", "empty", "half")))
    a, b = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    if kind == "linear":
        return nn.Linear(a, b, bias=draw(st.booleans()), device="meta")
    if kind == "norm":
        return nn.BatchNorm1d(a, device="meta")
    if kind == "embedding":
        return nn.Embedding(4 * a, b, device="meta")
    return nn.ReLU() if kind == "empty" else nn.Linear(a, b, device="meta", dtype=torch.float16)


def _tree(draw: st.DrawFn, depth: int, numbers: itertools.count[int]) -> nn.Module:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return _leaf(draw)
    module = draw(st.sampled_from((Block, Block, Whole)))()
    _fill(draw, module, depth, numbers)
    return module


def _fill(draw: st.DrawFn, module: nn.Module, depth: int, numbers: itertools.count[int]) -> None:
    # Names that no other name ends with: Accelerate looks for them anywhere in a name.
    for _ in range(draw(st.integers(1, 4))):
        module.add_module(f"m{next(numbers):03}", _tree(draw, depth - 1, numbers))
    if draw(st.integers(0, 3)) == 0:
        size = draw(st.integers(1, 30))
        module.register_parameter(f"p{next(numbers):03}", nn.Parameter(torch.empty(size, device="meta")))


@st.composite
def models(draw: st.DrawFn, tied: bool = True) -> nn.Module:
    """A model of which some weights may be tied, each group across different children of the root."""
    model = Block()
    numbers = itertools.count()
    _fill(draw, model, 3, numbers)
    if draw(st.booleans()):
        model.register_buffer("b", torch.empty(draw(st.integers(1, 20)), device="meta"))
    if tied and draw(st.booleans()):
        _tie(draw, model)
    return model


def _tie(draw: st.DrawFn, model: nn.Module) -> None:
    heads = draw(st.permutations([child for child in model.children() if any(True for _ in child.parameters())]))
    group = heads[: draw(st.integers(2, 3))]
    if len(group) < 2:
        return
    weight = nn.Parameter(torch.empty(draw(st.integers(4, 60)), device="meta"))
    for head in group:
        owners = [module for module in head.modules() if "weight" in module._parameters]
        if owners:
            draw(st.sampled_from(owners)).weight = weight


@st.composite
def limits(draw: st.DrawFn, most: int, *, accelerators: int = 1, disk: bool = True) -> dict[int | str, int | str]:
    """Limits of several devices, from far too little to more than enough."""
    count = draw(st.integers(accelerators, 4))
    found: dict[int | str, int | str] = {device: draw(st.integers(1, most)) for device in range(count)}
    if draw(st.booleans()):
        found["cpu"] = draw(st.integers(0, most))
    if disk and draw(st.integers(0, 3)) == 0:
        found["disk"] = "1GB"
    return dict(draw(st.permutations(list(found.items()))))
