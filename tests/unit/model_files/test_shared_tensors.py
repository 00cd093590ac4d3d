from __future__ import annotations

import torch
from torch import nn

from lockstep.model_files.shared_tensors import tied_names
from lockstep.utils import clean_state_dict_for_safetensors, id_tensor_storage
from tests.unit.checkpoint.small_models import Tied, on_meta


def test_tensors_of_one_storage_have_one_id() -> None:
    whole = torch.zeros(10)
    assert id_tensor_storage(whole) == id_tensor_storage(whole[5:]) == id_tensor_storage(whole.view(2, 5))
    assert id_tensor_storage(whole) != id_tensor_storage(torch.zeros(10))
    assert id_tensor_storage(whole)[0] == torch.device("cpu")
    assert id_tensor_storage(torch.empty(3, device="meta")) == id_tensor_storage(torch.empty(3, device="meta"))


def test_a_tied_tensor_stays_under_its_first_name() -> None:
    state = Tied().state_dict()
    before = list(state)
    cleaned = clean_state_dict_for_safetensors(state)
    assert [name for name in before if name not in cleaned] == ["head.weight"]
    assert list(state) == before


def test_parts_of_one_storage_are_different_weights() -> None:
    """Accelerate keeps only the first of them, and loses the others."""
    whole = torch.arange(10.0)
    state = {"low": whole[:5], "high": whole[5:], "turned": whole.view(2, 5).t(), "again": whole[:5]}
    cleaned = clean_state_dict_for_safetensors(state)
    assert list(cleaned) == ["low", "high", "turned"]
    assert torch.equal(cleaned["high"], whole[5:])
    assert all(tensor.is_contiguous() for tensor in cleaned.values())


def test_tensors_without_elements_or_values_are_not_tied_by_chance() -> None:
    state = {name: torch.empty(0) for name in "ab"} | {name: torch.empty(3, device="meta") for name in "cd"}
    assert tied_names(state) == []
    assert tied_names(on_meta().state_dict(keep_vars=True)) == [["embed.weight", "head.weight"]]


def test_what_is_no_tensor_passes_through() -> None:
    assert clean_state_dict_for_safetensors({"extra": {"a": 1}, "w": torch.ones(1)})["extra"] == {"a": 1}
    assert clean_state_dict_for_safetensors(nn.Linear(1, 1).state_dict()).keys() == {"weight", "bias"}
