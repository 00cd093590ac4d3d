"""``lockstep estimate`` counts a model's sizes as ``accelerate estimate-memory`` does."""

from __future__ import annotations

import pytest
import torch
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from torch import nn

from lockstep.estimate import find_model
from lockstep.estimate.estimate import sizes_of
from lockstep.estimate.optimizers import NAMED


class Direct(nn.Module):
    """Weights of its own beside its children, and a layer that must stay whole."""

    _no_split_modules = ("TransformerEncoderLayer",)

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(100, 16))
        self.body = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(2)))
        self.head = nn.Linear(16, 10)


@pytest.mark.parametrize(
    "factory",
    [
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 100)),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2)),
        Direct,
    ],
    ids=["linear", "conv", "direct"],
)
def test_sizes(factory) -> None:
    with torch.device("meta"):
        model = factory()
    total, (largest, _) = calculate_maximum_sizes(model)
    ours = sizes_of(find_model._of_module("here", model), "fp32", NAMED["adam"])
    assert ours.weights == total
    assert ours.largest_layer == largest
    theirs = max(estimate_training_usage(total, "float32").values())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    steps = 4 * len(list(model.parameters()))
    # Accelerate takes buffers for weights that are trained; Adam also counts its steps.
    assert ours.training_with_adam == theirs - 3 * buffers + steps
