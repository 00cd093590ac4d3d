"""Parameters under several names."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from lockstep import ConfigError
from lockstep.utils import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)


def model() -> nn.ModuleDict:
    whole = nn.ModuleDict({"b": nn.Linear(2, 2), "c": nn.Linear(2, 2), "a": nn.Linear(2, 2)})
    whole["a"].weight = whole["b"].weight
    return whole


def test_names_are_grouped() -> None:
    assert find_tied_parameters(model()) == [["a.weight", "b.weight"]]
    assert find_tied_parameters(nn.Linear(1, 1)) == []
    with pytest.raises(ConfigError, match="prefix"):
        find_tied_parameters(model(), prefix="x")


def test_a_shared_module_ties_all_it_has() -> None:
    whole = model()
    whole["d"] = whole["c"]
    assert find_tied_parameters(whole)[1:] == [["c.weight", "d.weight"], ["c.bias", "d.bias"]]


def test_tied_again_to_the_one_that_has_values() -> None:
    whole = model()
    whole["a"].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    retie_parameters(whole, [["a.weight", "b.weight"]])
    assert whole["a"].weight is whole["b"].weight
    assert not whole["a"].weight.is_meta
    retie_parameters(whole.to("meta"), [["a.weight", "b.weight"]])  # none has: they stay


def test_a_map_that_parts_them_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"": 0, "a": "cpu"})
        check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"": 0})
    assert len(caplog.messages) == 1
    assert "a.weight on cpu, b.weight on 0" in caplog.messages[0]


def test_what_transformers_says_of_its_models() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    for tie in (True, False):
        config.tie_word_embeddings = tie
        assert check_tied_parameters_in_config(transformers.GPT2LMHeadModel(config)) is tie
    assert not check_tied_parameters_in_config(model())
