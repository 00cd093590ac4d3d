"""What torch.nn.Module keeps in its tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.torch_internals import module as modules


class Saves(nn.Linear):
    def _save_to_state_dict(self, *arguments: Any) -> None:
        super()._save_to_state_dict(*arguments)


class Loads(nn.Linear):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


def hooked(method: str) -> nn.Module:
    made = nn.Linear(2, 1)
    getattr(made, method)(lambda *_: None)
    return made


def test_the_tables_are_the_modules_own() -> None:
    norm = nn.BatchNorm1d(2)
    parameters, buffers = modules.tensor_tables(norm)
    parameters["weight"] = fresh = nn.Parameter(torch.zeros(2))
    assert norm.weight is fresh
    assert modules.parameters_of(norm) is parameters
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert modules.unsaved_buffers(norm) == {"scratch"}
    del buffers["scratch"]
    tied = nn.Sequential(norm, norm)
    assert list(modules.children_of(tied)) == ["0", "1"]
    assert set(buffers) == {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize(
    ("made", "plainly"),
    [
        (nn.Linear(2, 1), True),
        (nn.BatchNorm1d(2), True),
        (Saves(2, 1), False),
        (Loads(2, 1), False),
        (hooked("register_load_state_dict_pre_hook"), False),
        (hooked("register_load_state_dict_post_hook"), False),
        (hooked("register_state_dict_pre_hook"), False),
        (hooked("register_state_dict_post_hook"), False),
    ],
)
def test_who_loads_plainly(made: nn.Module, plainly: bool) -> None:
    assert modules.loads_plainly(made) is plainly
    assert modules.loads_by_itself(made) is isinstance(made, Loads)


def test_norms_are_known() -> None:
    assert modules.is_norm(nn.InstanceNorm2d(3))
    assert modules.is_norm(nn.SyncBatchNorm(3))
    assert not modules.is_norm(nn.LayerNorm(3))


def test_hooks_rename_what_is_not_loaded_yet() -> None:
    net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.LazyLinear(1))
    before = net[0].weight.detach().clone()

    def rename(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    net[0].register_load_state_dict_pre_hook(rename)
    state = {"0.kernel": torch.ones(1, 2), "1.weight": torch.ones(1, 1), "1.bias": torch.ones(1)}
    modules.run_load_pre_hooks(net, state, True)
    assert set(state) == {"0.weight", "1.weight", "1.bias"}
    assert torch.equal(net[0].weight, before)
    assert isinstance(net[1].weight, nn.UninitializedParameter)


def test_device_of_move() -> None:
    assert modules.device_of_move("meta") == torch.device("meta")
    assert modules.device_of_move(device="cpu", dtype=torch.float16) == torch.device("cpu")
    assert modules.device_of_move(torch.empty(0, device="meta")) == torch.device("meta")
    assert modules.device_of_move(torch.float16) is None
