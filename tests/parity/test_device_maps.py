"""Device maps and limits, next to Accelerate's, over random models and devices that are not there."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import accelerate.utils as theirs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep import infer_auto_device_map
from lockstep import utils as ours
from tests.parity.random_models import limits, models

MANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
DTYPES = st.sampled_from((None, torch.float16, "bfloat16", torch.float64, "torch.int8"))


def size_of(model: nn.Module) -> int:
    return max(1, theirs.compute_module_sizes(model)[""])


@MANY
@given(st.data())
def test_maps_are_equal(data: st.DataObject) -> None:
    model = data.draw(models())
    memory = data.draw(limits(int(1.5 * size_of(model)), accelerators=0))
    options: dict[str, Any] = {
        "no_split_module_classes": data.draw(st.sampled_from((None, [], ["Whole"], "Whole"))),
        "dtype": data.draw(DTYPES),
        "clean_result": data.draw(st.booleans()),
        "offload_buffers": data.draw(st.booleans()),
        "fallback_allocation": data.draw(st.booleans()),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = theirs.infer_auto_device_map(model, copy.copy(memory), **options)
        found = infer_auto_device_map(model, copy.copy(memory), **options)
    assert found == expected


@MANY
@given(st.data())
def test_balanced_limits_are_equal(data: st.DataObject) -> None:
    model = data.draw(models())
    memory = data.draw(limits(2 * size_of(model), disk=False))
    options: dict[str, Any] = {
        "no_split_module_classes": data.draw(st.sampled_from((None, ["Whole"], ["Block", "Whole"]))),
        "dtype": data.draw(DTYPES),
        "low_zero": data.draw(st.booleans()),
    }
    expected = theirs.get_balanced_memory(model, copy.copy(memory), **options)
    assert ours.get_balanced_memory(model, copy.copy(memory), **options) == expected


@MANY
@given(st.data())
def test_sizes_layers_and_ties_are_equal(data: st.DataObject) -> None:
    model = data.draw(models())
    dtype = data.draw(DTYPES)
    special = {name: torch.float16 for name, _ in model.named_parameters() if data.draw(st.integers(0, 4)) == 0}
    expected = theirs.compute_module_sizes(model, dtype, special)
    assert ours.compute_module_sizes(model, dtype, special) == expected
    assert ours.calculate_maximum_sizes(model) == theirs.calculate_maximum_sizes(model)
    for whole in ([], ["Whole"]):
        parts = list(model.named_children())
        assert ours.get_max_layer_size(parts, expected, whole) == theirs.get_max_layer_size(parts, expected, whole)
    groups = [sorted(group) for group in theirs.find_tied_parameters(model)]
    assert sorted(ours.find_tied_parameters(model)) == sorted(groups)


# ---------------------------------------------------------------- where theirs is wrong


class Two(nn.Module):
    """A block with a buffer of its own beside its children."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(2))


def uncovered(model: nn.Module, device_map: dict[str, Any]) -> bool:
    try:
        theirs.check_device_map(model, device_map)
    except ValueError:
        return True
    return False


def test_the_buffers_of_a_block_that_is_split_are_placed() -> None:
    model = nn.Sequential(Two(), nn.Linear(8, 8))
    memory = {0: 600, 1: 10_000}
    assert uncovered(model, theirs.infer_auto_device_map(model, dict(memory)))
    found = infer_auto_device_map(model, dict(memory))
    assert found == {"0.a": 0, "0.b": 1, "0.scale": 1, "1": 1}
    ours.check_device_map(model, found)


def test_a_module_under_two_names_is_placed_under_both() -> None:
    model = nn.Module()
    model.a = model.b = nn.Linear(8, 8)
    model.c, model.d = nn.Linear(8, 8), nn.Linear(8, 8)
    with pytest.raises(IndexError):
        theirs.infer_auto_device_map(model, {0: 600, "cpu": 10_000}, clean_result=False)
    found = infer_auto_device_map(model, {0: 600, "cpu": 10_000}, clean_result=False)
    assert found == {"a": 0, "b": 0, "c": "cpu", "d": "cpu"}
    ours.check_device_map(model, found)


def test_a_part_tied_twice_counts_once() -> None:
    model = nn.Module()
    model.a, model.b, model.c = Two(), Two(), nn.Linear(8, 8)
    model.b.a, model.b.b = model.a.a, model.a.b
    memory = {0: 2000, "cpu": 10_000}
    found = infer_auto_device_map(model, dict(memory), no_split_module_classes=["Two"], clean_result=False)
    assert (found["a"], found["b"]) == (0, 0)
    need = ours.compute_module_sizes(model)
    assert need["a"] + need["b"] + need["c"] <= memory[0]


def test_a_name_inside_another_name_is_not_its_module() -> None:
    """Theirs takes ``m.x.weight``, which contains ``x.``, for a part of the module ``x``."""
    model = nn.Module()
    model.x, model.m, model.last = nn.Linear(8, 8, bias=False), nn.Module(), nn.Linear(8, 8, bias=False)
    model.m.x, model.m.y = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    model.m.x.weight = model.x.weight
    with pytest.raises(IndexError):
        theirs.infer_auto_device_map(model, {0: 600, 1: 5000})
    assert infer_auto_device_map(model, {0: 600, 1: 5000}) == {"x": 0, "m.x": 0, "m.y": 1, "last": 1}


def test_a_bool_takes_a_byte() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.ones(16, dtype=torch.bool))
    assert theirs.compute_module_sizes(model)[""] == 2
    assert ours.compute_module_sizes(model)[""] == model.mask.nbytes == 16


def test_the_disk_may_have_a_limit_in_balanced_memory() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="disk"):
        theirs.get_balanced_memory(model, {0: 100, "disk": 100})
    assert ours.get_balanced_memory(model, {0: 100, 1: 100, "disk": 100})["disk"] == 100
