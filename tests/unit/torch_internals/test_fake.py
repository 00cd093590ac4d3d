"""Tensors without data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.torch_internals import fake


def test_shapes_are_computed_and_real_tensors_go_along() -> None:
    with fake.fake_tensors():
        made = torch.empty(1 << 20, 1 << 20)  # 4 TB
        assert (made @ torch.empty(1 << 20, 3)).shape == (1 << 20, 3)
        assert nn.functional.linear(torch.empty(2, 3), torch.empty(4, 3)).device.type == "cpu"


def test_one_that_is_asked_for_its_value_raises_what_is_listed() -> None:
    with fake.fake_tensors():
        with pytest.raises(fake.LOOKS_AT_VALUES):
            torch.empty(1).item()
        with pytest.raises(fake.LOOKS_AT_VALUES):
            torch.empty(3).nonzero()
        with fake.real_tensors():
            assert torch.ones(1).item() == 1


def test_every_operation_is_seen() -> None:
    class Seen(fake.DispatchMode):
        names: list[str]

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = Seen()
    seen.names = []
    leaf = torch.ones(1, requires_grad=True)
    with seen:
        (leaf * 2).backward()
    assert seen.names.count("aten.mul.Tensor") == 2  # forward and backward


def test_trees_of_torch() -> None:
    tree = {"one": (torch.ones(1), 2), "more": [None, torch.ones(2)]}
    assert sum(isinstance(leaf, torch.Tensor) for leaf in fake.leaves(tree)) == 2
    assert fake.map_only(int, str, tree)["one"][1] == "2"
