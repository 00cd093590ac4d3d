"""Whatever is saved can be loaded: every kind of module and tensor, in both formats, by state and by model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep import Accelerator, load_checkpoint_in_model
from lockstep.errors import CheckpointError
from tests.unit.checkpoint.round_trips import FLOATS, INTEGERS, MODELS, TORCH_ONLY, Buffers, content, random_tensor

pytestmark = pytest.mark.usefixtures("alone")


def through_state(model: nn.Module, other: nn.Module, folder: Path, safe: bool, **options: Any) -> nn.Module:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(folder, safe_serialization=safe, durable=False, **options)
    accelerator.wait_for_checkpoint()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(other)
    accelerator.load_state(folder)
    return other


def through_model(model: nn.Module, other: nn.Module, folder: Path, safe: bool) -> nn.Module:
    Accelerator(cpu=True).save_model(model, folder, safe_serialization=safe)
    load_checkpoint_in_model(other, folder, strict=True)
    return other


WAYS = {"state": through_state, "model": through_model}


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "torch"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_can_be_loaded(tmp_path: Path, name: str, way: str, safe: bool) -> None:
    torch.manual_seed(0)
    model, other = MODELS[name](), MODELS[name]()
    assert not content(other) or name in ("empty", "old spectral norm") or content(model) != content(other)
    WAYS[way](model, other, tmp_path / "saved", safe)
    assert content(other) == content(model)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TORCH_ONLY)
def test_what_safetensors_cannot_hold_is_refused_by_name_and_kept_by_torch(tmp_path: Path, name: str, way: str) -> None:
    model, other = TORCH_ONLY[name](), TORCH_ONLY[name]()
    with pytest.raises(CheckpointError, match=r"(x|_extra_state) is .*safe_serialization=False"):
        WAYS[way](model, other, tmp_path / "saved", True)
    WAYS[way](model, other, tmp_path / "saved", False)
    assert content(other) == content(model)


@pytest.mark.parametrize("safe", [True, False])
def test_a_lazy_module_that_was_not_called_is_refused_by_name(tmp_path: Path, safe: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    for options in ({}, {"blocking": False}):
        refused = pytest.raises(CheckpointError, match=r"lazy modules .*1\.weight, 1\.bias.*Call the model once")
        with refused:  # in the background it is told when it is waited for
            accelerator.save_state(tmp_path / "state", safe_serialization=safe, **options)
            accelerator.wait_for_checkpoint()
    with pytest.raises(CheckpointError, match=r"lazy modules .*1\.weight, 1\.bias"):
        accelerator.save_model(model, tmp_path / "model", safe_serialization=safe)
    assert os.listdir(tmp_path) == []


def test_a_lazy_module_gets_its_shapes_from_the_file_or_stays_as_it_is(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    Accelerator(cpu=True).save_model(source, tmp_path / "saved")
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    load_checkpoint_in_model(lazy, tmp_path / "saved", strict=True)
    assert content(lazy) == content(source)
    misfit = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 7))
    with pytest.raises(CheckpointError, match=r"1\.weight has shape"):
        load_checkpoint_in_model(misfit, tmp_path / "saved", strict=True)
    assert misfit[0].has_uninitialized_params()


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_an_expanded_buffer_gets_memory_where_its_values_differ(tmp_path: Path, way: str, safe: bool) -> None:
    model, other = Buffers(x=torch.randn(4, 3)), Buffers(x=torch.zeros(3).expand(4, 3))
    held = other.x
    WAYS[way](model, other, tmp_path / "saved", safe)
    assert content(other) == content(model)
    assert other.x is held


def test_an_expanded_buffer_stays_expanded(tmp_path: Path) -> None:
    model, other = Buffers(x=torch.randn(3).expand(4, 3)), Buffers(x=torch.zeros(3).expand(4, 3))
    through_model(model, other, tmp_path / "saved", True)
    assert other.x.untyped_storage().nbytes() == 12


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, shape and layout in memory."""
    dtype = getattr(torch, draw(st.sampled_from([*FLOATS, *INTEGERS, "float32", "complex64"])))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    made = random_tensor(dtype, *shape)
    for _ in range(draw(st.integers(0, 2))):
        how = draw(st.sampled_from(["transposed", "cut", "every other", "expanded"]))
        if how == "transposed" and made.ndim > 1:
            made = made.transpose(0, made.ndim - 1)
        elif how == "cut" and made.ndim and len(made) > 1:
            made = made[1:]
        elif how == "every other" and made.ndim:
            made = made[..., ::2]
        elif how == "expanded":
            made = made.unsqueeze(0).expand(draw(st.integers(1, 3)), *made.shape)
    return made


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(tensors(), max_size=4), safe=st.booleans(), blocking=st.booleans())
def test_any_tensors_come_back(tmp_path: Path, values: list[Tensor], safe: bool, blocking: bool) -> None:
    names = [f"x{number}" for number in range(len(values))]
    model = Buffers(**dict(zip(names, values, strict=True)))
    blank = [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype) for value in values]
    other = Buffers(**dict(zip(names, blank, strict=True)))
    through_state(model, other, tmp_path / "state", safe, blocking=blocking)
    assert content(other) == content(model)


class Holder:
    """A registered object with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def test_what_stands_for_more_than_it_holds_comes_back(tmp_path: Path) -> None:
    """In the file an expanded tensor has all of its values: few bytes that stand for many are not believed."""
    wide = torch.arange(2.0).expand(2**24, 2)
    for thing in (holder := Holder(wide), other := Holder()):
        accelerator = Accelerator(cpu=True)
        accelerator.register_for_checkpointing(thing)
        if thing is holder:
            accelerator.save_state(tmp_path / "state", durable=False)
        else:
            accelerator.load_state(tmp_path / "state")
    assert torch.equal(other.state, wide)


class WithArrays(torch.optim.SGD):
    """An optimizer that keeps an array of numpy's and bytes beside its tensors."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["history"] = np.arange(3.0)
            for parameter in group["params"]:
                self.state[parameter]["note"] = b"\0\xff"


def test_an_optimizer_may_keep_arrays(tmp_path: Path) -> None:
    found = []
    for number in range(2):
        accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
        model, optimizer = accelerator.prepare(model, WithArrays(model.parameters(), lr=0.1, momentum=0.9))
        if number:
            accelerator.load_state(tmp_path / "state")
        else:
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            accelerator.save_state(tmp_path / "state")
        found.append(optimizer.state_dict())
    (first, second), (ours, theirs) = (
        [state["param_groups"][0] for state in found],
        [state["state"][0] for state in found],
    )
    assert np.array_equal(first["history"], second["history"])
    assert ours["note"] == theirs["note"] == b"\0\xff"
    assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])


@pytest.mark.soak_long
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_more_than_4_gib(tmp_path: Path, way: str, safe: bool) -> None:
    model = Buffers(x=torch.zeros(2**32 + 5, dtype=torch.uint8))
    model.x[[0, 2**31, 2**32 - 1, 2**32, -1]] = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    other = Buffers(x=torch.zeros(2**32 + 5, dtype=torch.uint8))
    WAYS[way](model, other, tmp_path / "saved", safe)
    assert other.x[[0, 2**31, 2**32 - 1, 2**32, -1]].tolist() == [1, 2, 3, 4, 5]
    assert int(other.x.count_nonzero()) == 5
    shutil.rmtree(tmp_path / "saved")  # not kept with the files of other tests: it is large


@pytest.mark.soak_long
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_100_000_small_tensors(tmp_path: Path, way: str, safe: bool) -> None:
    model, other = (Buffers(**{f"x{number}": torch.randn(2) for number in range(100_000)}) for _ in range(2))
    WAYS[way](model, other, tmp_path / "saved", safe)
    assert content(other) == content(model)
