from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import CheckpointError
from lockstep.model_files.state_loader import load_into
from tests.unit.checkpoint.small_models import Tied, bits, on_meta, same_values


def snapshot(model: nn.Module) -> dict[str, tuple]:
    return {name: (id(t), bits(t)) for name, t in model.state_dict(keep_vars=True).items()}


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


WRONG = {
    "a shape": (
        lambda s: s | {"block.weight": torch.zeros(8, 9)},
        r"block\.weight has shape \(8, 9\) there, and \(8, 8\)",
    ),
    "a dimension less": (lambda s: s | {"block.bias": torch.zeros(())}, r"block\.bias has shape \(\)"),
    "integers for floats": (
        lambda s: s | {"block.bias": torch.zeros(8, dtype=torch.int32)},
        r"block\.bias is of torch\.int32 there, and of torch\.float32",
    ),
    "complex for real": (lambda s: s | {"block.bias": torch.zeros(8, dtype=torch.complex64)}, "torch.complex64 there"),
    "no tensor": (lambda s: s | {"block.bias": "text"}, r"block\.bias is a str there, and a tensor"),
    "foreign": (lambda s: {"x": torch.zeros(1)}, r"not one of its 1 names \(x\) is a name of the model"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_leaves_the_model_untouched(kind: str, strict: bool) -> None:
    change, said = WRONG[kind]
    model = Tied()
    before = snapshot(model)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_into(model, change(Tied().state_dict()), strict)
    assert "left as it is" in str(caught.value)
    assert snapshot(model) == before


def test_names_are_compared_where_asked() -> None:
    state = without(Tied().state_dict(), "block.bias") | {"stranger": torch.zeros(1)}
    model = Tied()
    before = snapshot(model)
    with pytest.raises(
        CheckpointError, match=r"names of the model are not there: block\.bias\n.*not in the model: str"
    ):
        load_into(model, state, strict=True)
    assert snapshot(model) == before
    loaded = load_into(model, state, strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["block.bias"], ["stranger"])
    assert bits(model.block.weight) == bits(state["block.weight"])
    assert snapshot(model)["block.bias"] == before["block.bias"]


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_one_name_of_a_tie_is_enough(kept: str) -> None:
    source = Tied()
    other = {"embed.weight": "head.weight", "head.weight": "embed.weight"}[kept]
    for model in (Tied(), on_meta()):
        assert load_into(model, without(source.state_dict(), other), strict=True).missing_keys == []
        assert model.head.weight is model.embed.weight
        assert same_values(model, source)


def test_a_tie_that_is_torn_in_the_file_is_no_secret(alone: None, caplog: pytest.LogCaptureFixture) -> None:
    state = Tied().state_dict() | {"head.weight": torch.zeros(11, 8)}
    model = Tied()
    with pytest.raises(CheckpointError, match=r"embed\.weight and head\.weight are one tensor in the model, and two"):
        load_into(model, state, strict=True)
    load_into(model, state, strict=False)
    assert "two that differ there; the last one is used" in caplog.text
    assert not model.embed.weight.any()


def test_whoever_holds_the_weights_sees_the_new_values() -> None:
    model, source = Tied(), Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = [id(parameter) for parameter in model.parameters()]
    load_into(model, source.state_dict())
    assert [id(parameter) for parameter in model.parameters()] == held
    assert bits(optimizer.param_groups[0]["params"][0]) == bits(source.embed.weight)


def test_a_frozen_weight_on_meta_stays_frozen() -> None:
    model = on_meta()
    model.block.weight.requires_grad_(False)
    load_into(model, Tied().state_dict())
    assert not model.block.weight.requires_grad
    assert model.block.bias.requires_grad
    assert not model.block.bias.is_meta


def test_values_are_converted_to_the_models_precision() -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    source = nn.Linear(2, 2)
    load_into(model, source.state_dict())
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight, source.weight.bfloat16())


def test_what_is_loaded_does_not_share_memory_with_where_it_came_from() -> None:
    source = Tied().state_dict()
    for model in (Tied(), on_meta()):
        load_into(model, source)
        with torch.no_grad():
            model.block.weight.zero_()
        assert source["block.weight"].any()


def test_views_of_one_storage_stay_what_they_are() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(10)
            self.low, self.high = nn.Parameter(whole[:5]), nn.Parameter(whole[5:])

    model, source = Views(), Views()
    load_into(model, source.state_dict())
    assert same_values(model, source)
    assert model.low.untyped_storage().data_ptr() == model.high.untyped_storage().data_ptr()


def test_a_part_may_be_called_like_a_method() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.half = nn.Linear(2, 2)  # nn.Module.half is what getattr finds

    model, source = Halves(), Halves()
    load_into(model, source.state_dict())
    assert same_values(model, source)


# ---------------------------------------------------------------- modules that load by code of their own


def test_a_norm_of_an_old_file_needs_no_count_of_batches() -> None:
    model = Tied()
    state = without(Tied().state_dict(), "norm.num_batches_tracked")
    assert load_into(model, state, strict=True).missing_keys == []


def test_hooks_that_rename_are_heeded_before_names_are_compared() -> None:
    model = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    old = OrderedDict(weight_g=torch.full((3, 1), 2.0), weight_v=torch.ones(3, 2), bias=torch.zeros(3))
    assert load_into(model, old, strict=True).unexpected_keys == []
    assert model.parametrizations.weight.original0.flatten().tolist() == [2.0] * 3
    before = snapshot(model)
    with pytest.raises(CheckpointError, match="original0 has shape"):
        load_into(model, old | {"weight_g": torch.zeros(7, 1)}, strict=True)
    assert snapshot(model) == before


class Counts(nn.Linear):
    """Keeps something besides tensors."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_extra_state_is_handed_to_its_module() -> None:
    source, model = Counts(2, 2), Counts(2, 2)
    source.count = 7
    load_into(model, source.state_dict())
    assert model.count == 7
    assert torch.equal(model.weight, source.weight)
    with pytest.raises(CheckpointError, match="not there: _extra_state"):
        load_into(model, without(source.state_dict(), "_extra_state"), strict=True)


class Own(nn.Module):
    """Keeps its weight under another name than it has, and loads it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = self.weight.detach() + 1

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "packed"] - 1)


def test_a_module_with_a_format_of_its_own_loads_it() -> None:
    source, model = nn.Sequential(Own(), nn.Linear(2, 2)), nn.Sequential(Own(), nn.Linear(2, 2))
    with torch.no_grad():
        source[0].weight.fill_(5)
    assert load_into(model, source.state_dict(), strict=True).missing_keys == []
    assert model[0].weight.tolist() == [5.0, 5.0]
    assert torch.equal(model[1].weight, source[1].weight)


def test_a_lazy_module_takes_the_shape_it_is_given() -> None:
    model = nn.LazyLinear(3)
    load_into(model, nn.Linear(4, 3).state_dict())
    assert model.weight.shape == (3, 4)
