"""Models with every kind of tensor that a module can hold, and whether two of them hold the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


class Buffers(nn.Module):
    """A module with a parameter and these buffers."""

    def __init__(self, **buffers: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        for name, value in buffers.items():
            self.register_buffer(name, value)


class Symmetric(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.triu() + value.triu(1).T

    def right_inverse(self, value: Tensor) -> Tensor:
        return value.triu()


class WithExtra(nn.Module):
    """A module that keeps something besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.number = nn.Parameter(torch.ones(2)), int(torch.randint(1000, ()))

    def get_extra_state(self) -> dict[str, int]:
        return {"number": self.number}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class WithHook(nn.Module):
    """A module whose names were others once, so that torch has to load it; with a buffer that is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.register_buffer("mask", torch.randn(3).expand(2, 3))
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: None)


def tied() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    return model


def overlapping() -> nn.Module:
    memory = torch.randn(10)
    return Buffers(one=memory[:6], other=memory[4:])


def called(model: nn.Module) -> nn.Module:
    model(torch.randn(2, 4))
    return model


def symmetric() -> nn.Module:
    model = nn.Linear(3, 3)
    parametrize.register_parametrization(model, "weight", Symmetric())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "expanded": lambda: Buffers(x=torch.randn(3).expand(4, 3), y=torch.randn(()).expand(2, 5)),
    "expanded in the middle": lambda: Buffers(x=torch.randn(2, 1, 3).expand(2, 4, 3)),
    "expanded, with NaN": lambda: Buffers(x=torch.tensor([torch.nan, 1.0]).expand(3, 2)),
    "windows of one storage": lambda: Buffers(x=torch.randn(10).as_strided((4, 3), (2, 1))),
    "overlapping": overlapping,
    "tied": tied,
    "transposed": lambda: Buffers(x=torch.randn(3, 4).t(), y=torch.randn(4, 6)[:, ::2]),
    "channels last": lambda: nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last),
    "a part of a large storage": lambda: Buffers(x=torch.randn(100_000)[5:8]),
    "empty": lambda: Buffers(x=torch.empty(0), y=torch.empty(2, 0, 3), z=torch.empty(0, dtype=torch.int64)),
    "0-dim": lambda: Buffers(x=torch.randn(()), y=torch.randint(9, ()), z=torch.rand(()) > 0.5),
    "no buffer": lambda: Buffers(x=None),
    "conjugate": lambda: Buffers(x=torch.randn(3, dtype=torch.complex64).conj()),
    "negative view": lambda: Buffers(x=torch.randn(3, dtype=torch.complex64).conj().imag),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "parametrized": symmetric,
    "a hook and an expanded buffer": WithHook,
    "lazy, after a call": lambda: called(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())),
    "norms": lambda: called(nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4))),
    "recurrent": lambda: nn.LSTM(3, 4, 2),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "lists": lambda: nn.ParameterList([torch.randn(2), torch.randn(())]),
}
FLOATS = ["float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
          "float8_e8m0fnu"]  # fmt: skip
INTEGERS = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool"]
TORCH_ONLY: dict[str, Callable[[], nn.Module]] = {
    "sparse": lambda: Buffers(x=torch.eye(3).to_sparse() * torch.randn(())),
    "quantized": lambda: Buffers(x=torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)),
    "extra state": WithExtra,
    "complex128": lambda: Buffers(x=torch.randn(3, dtype=torch.complex128)),
    "complex32": lambda: Buffers(x=torch.randn(3).to(torch.complex32)),
}
"""What the safetensors format cannot hold: it is refused by name when it is saved."""


def random_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits but those of NaN, of which no two are equal."""
    if dtype.is_complex or dtype.is_floating_point:
        made = torch.randn(shape, dtype=torch.complex64) if dtype.is_complex else torch.randn(shape).abs()
        return made.to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


def of_dtype(name: str) -> Callable[[], nn.Module]:
    dtype = getattr(torch, name)
    return lambda: Buffers(
        **{f"x{len(shape)}": random_tensor(dtype, *shape) for shape in ((), (3,), (4, 3), (2, 0, 1))}
    )


MODELS |= {name: of_dtype(name) for name in [*FLOATS, *INTEGERS, "complex64"]}


def content(model: nn.Module) -> dict[str, Any]:
    """Everything that the model holds, to the bit."""
    return {name: bits(value) for name, value in model.state_dict().items()}


def bits(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    kind = value.shape, value.dtype
    if value.is_quantized:
        return kind, value.int_repr().tolist(), value.q_scale()
    value = value.to_dense() if value.is_sparse else value
    whole = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return kind, bytes(whole.untyped_storage())
