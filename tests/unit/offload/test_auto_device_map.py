"""Dividing a model. The maps are compared with Accelerate's in tests/parity/test_device_maps.py."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import ConfigError, infer_auto_device_map
from lockstep.utils.modeling import check_device_map, clean_device_map, get_balanced_memory


def blocks(count: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(count)))


def test_in_order_and_room_is_kept_for_the_largest_layer() -> None:
    found = infer_auto_device_map(blocks(), {0: 2 * 576 + 288, 1: 576, "cpu": 400}, ["Sequential"])
    assert found == {"0": 0, "1": 1, "2": "disk", "3": "disk"}  # now 576 bytes are kept free on 0 and the host
    found = infer_auto_device_map(blocks(), {0: 2 * 576 + 288, 1: 576, "cpu": 600})
    assert found == {"0": 0, "1": 0, "2": 1, "3": "cpu"}


def test_every_decision_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(blocks(2), {0: 600, "cpu": 600}, verbose=True)
    printed = capsys.readouterr().out
    assert "0 (576 bytes) does not fit on 0 (312 bytes left): split" in printed
    assert "0.0 (288 bytes): 0" in printed


def test_an_empty_device_is_reported_and_can_be_filled_by_a_later_part(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(2, 2), nn.Linear(20, 20))
    with caplog.at_level(logging.INFO):
        assert infer_auto_device_map(model, {0: 1000, 1: 9000}) == {"": 1}
    found = infer_auto_device_map(model, {0: 1720, 1: 9000}, fallback_allocation=True)
    assert found == {"0": 1, "1": 0, "2": 1}


def test_buffers_that_find_no_room_are_warned_of() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(200))
    with pytest.warns(UserWarning, match="offload_buffers=True"):
        assert infer_auto_device_map(model, {0: 320, "cpu": 5000}) == {"": "cpu"}


@pytest.mark.filterwarnings("error")
def test_buffers_that_are_offloaded_or_fit_are_not() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(200))
    infer_auto_device_map(model, {0: 320, "cpu": 5000}, offload_buffers=True)
    infer_auto_device_map(model, {0: 320, 1: 3000, "cpu": 5000})
    infer_auto_device_map(model, {"cpu": 5000})


def test_balanced_limits() -> None:
    model = blocks()
    assert get_balanced_memory(model, {"cpu": 100}) == {"cpu": 100}
    even = get_balanced_memory(model, {0: 10_000, 1: 10_000})
    assert infer_auto_device_map(model, even) == {"0": 0, "1": 0, "2": 1, "3": 1}
    low = get_balanced_memory(model, {0: 10_000, 1: 10_000, 2: 10_000}, low_zero=True)
    assert low[0] == 0
    assert get_balanced_memory(model, {1: 10_000, 3: 10_000}, low_zero=True)[3] == 10_000  # there is no device 0


@pytest.mark.parametrize(
    ("entries", "cleaned"),
    [
        ({"a.x": 0, "a.y": 0, "b": 1}, {"a": 0, "b": 1}),
        ({"b.x": 1, "a.x.p": 0, "a.x.q": 0, "a.y": 1}, {"b.x": 1, "a.x": 0, "a.y": 1}),
        ({"a.x": 0, "b": 0}, {"": 0}),
        ({"a": "cpu"}, {"a": "cpu"}),
        ({"ab.x": 0, "ab.y": 0, "a": 1}, {"ab": 0, "a": 1}),
    ],
)
def test_entries_are_merged_and_keep_their_order(entries: dict[str, Any], cleaned: dict[str, Any]) -> None:
    found = dict(entries)
    assert clean_device_map(found) is found
    assert list(found.items()) == list(cleaned.items())


def test_a_map_that_does_not_fit_the_model() -> None:
    model = blocks(2)
    model.register_buffer("extra", torch.ones(1), persistent=False)
    check_device_map(model, {"0": 0, "1.0": 7, "1.1": "disk", "extra": 0})
    with pytest.raises(ConfigError, match="does not have: '2', 'head'"):
        check_device_map(model, {"": 0, "2": 0, "head": 1})
    with pytest.raises(ConfigError, match=r"nothing of 4 weights of the model: 1.0.weight, 1.0.bias"):
        check_device_map(model, {"0": 0})
    with pytest.raises(ConfigError, match="not a table"):
        check_device_map(model, "auto")  # type: ignore[arg-type]
