"""Mixed precision around a model, on the CPU."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lockstep import Accelerator, AutocastKwargs, ConfigError
from lockstep.utils import convert_outputs_to_fp32, convert_to_fp32

pytestmark = pytest.mark.usefixtures("alone")

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Answer:
    logits: Tensor
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    note: str = "kept"


class Output(OrderedDict):
    """An output that can be read by key and by attribute, as those of transformers."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Shaped(nn.Module):
    """Gives what its linear layer computed, in some shape, and notes the dtype it computed in."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.shape = shape
        self.dtype: torch.dtype | None = None

    def forward(self, inputs: Tensor, scale: float = 1.0, *, flip: bool = False) -> Any:
        """Compute."""
        outputs = self.linear(inputs) * scale
        self.dtype = outputs.dtype
        return self.shape(outputs)


def as_output(value: Tensor) -> Output:
    output = Output()
    output["loss"] = value.sum()
    output["logits"] = (value, [value])
    return output


SHAPES: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda v: v, lambda o: [o]),
    "tuple": (lambda v: (v, (v, None)), lambda o: [o[0], o[1][0]]),
    "list": (lambda v: [v, "text"], lambda o: [o[0]]),
    "dict": (lambda v: {"a": v, "b": {"c": v}}, lambda o: [o["a"], o["b"]["c"]]),
    "named": (lambda v: Pair(v, {"r": v}), lambda o: [o.left, o.right["r"]]),
    "dataclass": (lambda v: Answer(v, [v]), lambda o: [o.logits, o.extra[0]]),
    "frozen": (Frozen, lambda o: [o.logits]),
    "output": (as_output, lambda o: [o["loss"], o.loss, o["logits"][0], o.logits[1][0]]),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_outputs_come_back_in_fp32(precision: str, name: str) -> None:
    shape, tensors = SHAPES[name]
    model = Accelerator(cpu=True, mixed_precision=precision).prepare(Shaped(shape))
    outputs = model(torch.ones(1, 2))
    assert model.dtype is HALF[precision]
    assert type(outputs) is type(shape(torch.ones(1)))
    assert [tensor.dtype for tensor in tensors(outputs)] == [torch.float32] * len(tensors(outputs))
    assert all(tensor.requires_grad for tensor in tensors(outputs))


def test_other_dtypes_stay() -> None:
    whole = {"ids": torch.arange(3), "flag": torch.tensor(True), "half": torch.ones(1, dtype=torch.float16), "n": 3}
    converted = convert_to_fp32(whole)
    assert converted["ids"].dtype is torch.int64
    assert converted["flag"].dtype is torch.bool
    assert converted["half"].dtype is torch.float32
    assert converted["n"] == 3
    assert whole["half"].dtype is torch.float16


def test_no_mixed_precision_leaves_the_model_alone() -> None:
    model = Shaped(lambda v: v)
    prepared = Accelerator(cpu=True, mixed_precision="no").prepare(model)
    assert prepared(torch.ones(1, 2)).dtype is torch.float32
    assert model.dtype is torch.float32
    assert "forward" not in model.__dict__


def test_autocast_can_be_switched_off() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    model = accelerator.prepare(Shaped(lambda v: v))
    model(torch.ones(1, 2))
    assert model.dtype is torch.float32


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_the_autocast_region(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    ones = torch.ones(2, 2)
    with accelerator.autocast():
        assert (ones @ ones).dtype is HALF.get(precision, torch.float32)
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (ones @ ones).dtype is torch.float32
    assert (ones @ ones).dtype is torch.float32


def test_a_copy_has_its_own_forward() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(Shaped(lambda v: v))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.linear.weight.zero_()
        other.linear.bias.fill_(3.0)
    assert other(torch.ones(1, 2)).tolist() == [[3.0, 3.0]]
    assert other.dtype is torch.bfloat16
    assert model(torch.ones(1, 2)).tolist() != [[3.0, 3.0]]
    assert other.forward.forward.__self__ is other


def test_a_prepared_model_can_be_pickled() -> None:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(2, 2))
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_the_signature_stays() -> None:
    model = Shaped(lambda v: v)
    wanted = inspect.signature(model.forward)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    assert inspect.signature(prepared.forward) == wanted
    assert list(inspect.signature(prepared.forward).parameters) == ["inputs", "scale", "flip"]
    assert prepared.forward.__doc__ == "Compute."


def test_prepared_twice_is_wrapped_once() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(accelerator.prepare(Shaped(lambda v: v)))
    assert inspect.ismethod(model.forward.forward)
    accelerator.free_memory()
    again = accelerator.prepare(model)
    assert inspect.ismethod(again.forward.forward)


def test_the_free_wrapper() -> None:
    wrapped = convert_outputs_to_fp32(lambda value: {"x": value.half()})
    assert wrapped(torch.ones(1))["x"].dtype is torch.float32


def test_the_first_accelerator_settles_the_precision() -> None:
    Accelerator(cpu=True, mixed_precision="bf16")
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    with pytest.raises(ConfigError, match=r"mixed_precision='fp16': .*already trains with mixed_precision='bf16'"):
        Accelerator(cpu=True, mixed_precision="fp16")
