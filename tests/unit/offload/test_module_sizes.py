"""Bytes of parts of a model. Next to Accelerate's in tests/parity/test_device_maps.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep import ConfigError
from lockstep.utils.modeling import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    dtype_byte_size,
    get_non_persistent_buffers,
    named_module_tensors,
)


def model() -> nn.Module:
    whole = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1, dtype=torch.float16)))
    whole[1].register_buffer("mask", torch.ones(5, dtype=torch.bool), persistent=False)
    return whole


def test_each_name_has_what_lies_below_it() -> None:
    sizes = compute_module_sizes(model())
    assert sizes["0"] == 36
    assert sizes["1.0"] == 4 * 12 + 8
    assert sizes["1.1.weight"] == 6
    assert sizes["1"] == 56 + 8 + 5
    assert sizes[""] == 36 + 69
    assert compute_module_total_buffer_size(model()) == 24 + 8 + 5


def test_a_dtype_narrows_what_can_be_converted() -> None:
    sizes = compute_module_sizes(model(), dtype="torch.bfloat16", special_dtypes={"0.weight": torch.float64})
    assert sizes["0"] == 6 * 8 + 3 * 2
    assert sizes["1.0"] == 12 * 2 + 8
    assert compute_module_sizes(model(), dtype=torch.float64)["1.1.weight"] == 6


def test_tied_and_lazy_weights() -> None:
    whole = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.LazyLinear(3))
    whole[1].weight = whole[0].weight
    assert compute_module_sizes(whole)[""] == 16


def test_the_largest_layer() -> None:
    whole = model()
    assert calculate_maximum_sizes(whole) == (105, (56, ["1.0"]))
    whole._no_split_modules = ["Sequential"]  # type: ignore[assignment]
    assert calculate_maximum_sizes(whole)[1] == (69, ["1"])


def test_tensors_of_a_module_and_buffers_that_are_not_saved() -> None:
    whole = model()
    assert [name for name, _ in named_module_tensors(whole[1])] == ["mask"]
    assert not list(named_module_tensors(whole[1], remove_non_persistent=True))
    every = {name for name, _ in named_module_tensors(whole, recurse=True)}
    kept = {name for name, _ in named_module_tensors(whole, recurse=True, remove_non_persistent=True)}
    assert every - kept == {"1.mask"} == get_non_persistent_buffers(whole, recurse=True)
    assert not {name for name, _ in named_module_tensors(whole, include_buffers=False, recurse=True)} & {"1.mask"}


def test_what_is_no_dtype() -> None:
    assert dtype_byte_size(torch.complex64) == 8
    with pytest.raises(ConfigError, match="dtype='float15'"):
        compute_module_sizes(model(), dtype="float15")
    with pytest.raises(ConfigError, match=r"special_dtypes\['0.weight'\]"):
        compute_module_sizes(model(), special_dtypes={"0.weight": "nn"})
