"""Models without memory for their weights."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from lockstep import init_empty_weights, init_on_device
from lockstep.config import env
from lockstep.errors import ConfigError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.last.weight.marked = True  # type: ignore[attr-defined]
        self.frozen = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)


def test_parameters_have_no_memory_and_buffers_have_values() -> None:
    with init_empty_weights():
        model = Net()
    assert all(parameter.is_meta and type(parameter) is nn.Parameter for parameter in model.parameters())
    assert torch.equal(model.norm.running_var, torch.ones(4))
    assert not model.frozen.requires_grad
    assert model.first.weight.requires_grad
    assert not nn.Linear(1, 1).weight.is_meta


def test_what_is_tied_inside_stays_tied() -> None:
    with init_empty_weights():
        model = Net()
    assert model.last.weight is model.first.weight
    assert model.first.weight.marked


def test_a_hundred_billion_parameters() -> None:
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(10_000, 10_000) for _ in range(1000)))
    assert sum(parameter.numel() for parameter in model.parameters()) > 10**11


def test_buffers_on_request_or_by_the_environment() -> None:
    with init_empty_weights(include_buffers=True):
        assert Net().norm.running_var.is_meta
    for name in ("LOCKSTEP_INIT_INCLUDE_BUFFERS", "ACCELERATE_INIT_INCLUDE_BUFFERS"):
        with env.patched({name: "yes"}):
            with init_empty_weights():
                assert Net().norm.running_var.is_meta
            with init_empty_weights(include_buffers=False):
                assert not Net().norm.running_var.is_meta
        with env.patched({name: "perhaps"}), pytest.raises(ConfigError, match=name), init_empty_weights():
            pass


def test_an_error_inside_ends_it() -> None:
    with pytest.raises(ValueError, match="mine"), init_empty_weights():
        raise ValueError("mine")
    assert not Net().first.weight.is_meta


def test_lazy_and_missing_parameters_are_left_alone() -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.LazyLinear(3), nn.Linear(2, 2, bias=False))
    assert model[1].bias is None
    assert isinstance(model[0].weight, nn.UninitializedParameter)


def test_another_device_and_a_subclass() -> None:
    class Mine(nn.Parameter):
        pass

    with init_on_device("meta"):
        module = nn.Module()
        module.weight = Mine(torch.ones(2))
        assert isinstance(module.weight, Mine)
        assert module.weight.is_meta
    with init_on_device(torch.device("cpu")):
        assert nn.Linear(1, 1, device="meta").weight.device.type == "cpu"


def test_one_inside_the_other() -> None:
    with init_empty_weights():
        with init_empty_weights():
            assert nn.Linear(1, 1).weight.is_meta
        assert nn.Linear(1, 1).weight.is_meta


def test_it_ends_though_another_thread_builds_models() -> None:
    ready, done = threading.Event(), threading.Event()

    def build() -> None:
        ready.wait(10)
        nn.Linear(2, 2)
        done.set()

    thread = threading.Thread(target=build)
    thread.start()
    with init_empty_weights():
        ready.set()
        done.wait(10)
    thread.join()
    assert not nn.Linear(1, 1).weight.is_meta
