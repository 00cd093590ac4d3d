"""Hooks around a module's forward."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.big_modeling import attach_layerwise_casting_hooks, cpu_offload_with_hook
from lockstep.hooks import (
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class Add(ModelHook):
    """Adds to the input, and to the output."""

    def __init__(self, before: float = 0.0, after: float = 0.0) -> None:
        self.before, self.after = before, after
        self.events: list[str] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.events.append("init")
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.events.append("detach")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args[0] + self.before, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + self.after

    def forward_failed(self, module: nn.Module) -> None:
        self.events.append("failed")


def test_a_hook_changes_inputs_and_outputs_until_it_is_removed() -> None:
    module = nn.Identity()
    hook = Add(1, 10)
    assert add_hook_to_module(module, hook) is module
    assert module(torch.zeros(1)).item() == 11
    remove_hook_from_module(module)
    assert module(torch.zeros(1)).item() == 0
    assert hook.events == ["init", "detach"]
    assert set(module.__dict__) == set(nn.Identity().__dict__)


def test_one_replaces_the_other_or_follows_it() -> None:
    module = nn.Identity()
    add_hook_to_module(module, first := Add(1))
    add_hook_to_module(module, Add(2))
    assert first.events == ["init", "detach"]
    assert module(torch.zeros(1)).item() == 2
    add_hook_to_module(module, Add(0, 5), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert module(torch.zeros(1)).item() == 7


def test_a_forward_of_the_modules_own_comes_back() -> None:
    module = nn.Identity()
    module.forward = own = lambda value: value * 3
    add_hook_to_module(module, Add(1))
    assert module(torch.ones(1)).item() == 6
    assert remove_hook_from_module(module).forward is own


def test_signature_copies_and_pickles() -> None:
    module = nn.Linear(2, 2)
    add_hook_to_module(module, Add(1))
    assert list(inspect.signature(module.forward).parameters) == ["input"]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        nn.init.zeros_(other.weight)
        nn.init.constant_(other.bias, 7)
        assert other(torch.zeros(2)).tolist() == [7, 7]  # its own weights, not those of the original
    assert not torch.equal(module(torch.zeros(2)), torch.tensor([7.0, 7.0]))


def test_without_gradients() -> None:
    module = nn.Linear(1, 1)
    hook = ModelHook()
    hook.no_grad = True
    add_hook_to_module(module, hook)
    assert not module(torch.ones(1)).requires_grad


def test_a_forward_that_raises_is_told_to_the_hooks() -> None:
    class Fails(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("mine")

    module, hooks = Fails(), [Add(), Add()]
    add_hook_to_module(module, SequentialHook(*hooks))
    with pytest.raises(RuntimeError, match="mine"):
        module(torch.ones(1))
    assert [hook.events[-1] for hook in hooks] == ["failed", "failed"]


def test_a_hook_made_for_accelerate_works() -> None:
    from accelerate.hooks import ModelHook as Theirs

    module = nn.Linear(1, 1)
    add_hook_to_module(module, Theirs(), append=True)
    add_hook_to_module(module, Add(), append=True)
    with pytest.raises(RuntimeError, match="mat1"):
        module(torch.ones(1, 3))
    assert module(torch.ones(1, 1)).shape == (1, 1)


def test_all_hooks_of_a_model_are_removed() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    for module in model.modules():
        add_hook_to_module(module, Add())
    remove_hook_from_submodules(model)
    assert not [module for module in model.modules() if "_hf_hook" in module.__dict__ or "forward" in module.__dict__]


# ---------------------------------------------------------------- whole models in turn


def test_models_take_turns() -> None:
    one, first = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    two, second = cpu_offload_with_hook(nn.Linear(2, 2), torch.device("cpu"), prev_module_hook=first)
    moved: list[str] = []
    one.to = lambda device: moved.append(f"one {device}") or one  # type: ignore[method-assign, func-returns-value]
    two(one(torch.ones(2)))
    assert moved == ["one cpu", "one cpu"]  # to its device for its forward, and off it for that of the second
    second.remove()
    assert "_hf_hook" not in two.__dict__
    assert isinstance(first, UserCpuOffloadHook)
    assert isinstance(first.hook, CpuOffload)
    assert CpuOffload().execution_device == torch.device("cpu")


# ---------------------------------------------------------------- narrow weights


def test_layers_are_narrow_between_forwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ModuleDict({"out": nn.Linear(4, 4)})["out"])
    want = model(torch.ones(2, 4))
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern="^2$")
    assert [module.weight.dtype for module in model] == [torch.float8_e4m3fn, torch.float32, torch.float32]
    assert torch.allclose(model(torch.ones(2, 4)), want, atol=0.2)
    assert model[0].weight.dtype is torch.float8_e4m3fn
    with pytest.raises(RuntimeError):
        model[0](torch.ones(2, 3))
    assert model[0].weight.dtype is torch.float8_e4m3fn


def test_classes_are_left_alone_or_the_module_is_cast_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1))
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, skip_modules_classes=(nn.Conv1d,))
    assert [module.weight.dtype for module in model] == [torch.bfloat16, torch.float32]
    whole = nn.LayerNorm(2)
    attach_layerwise_casting_hooks(whole, torch.bfloat16, torch.float32)
    assert isinstance(whole._hf_hook, LayerwiseCastingHook)
    assert whole.weight.dtype is torch.bfloat16
    assert whole(torch.ones(1, 2)).dtype is torch.float32
