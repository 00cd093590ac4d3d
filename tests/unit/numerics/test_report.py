"""The detector's words: why a number became NaN or infinite."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from lockstep.debug_utils import DebugUnderflowOverflow

Out = pytest.CaptureFixture[str]


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


class Cancelled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x) - (x * x)


class Outer(nn.Module):
    """Multiplies what the modules in it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(1e25), Scale(1e25)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.second(x)


class Scale(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value


class Huge(nn.Linear):
    """A linear layer with weights of 1e20."""

    def __init__(self, fan_in: int) -> None:
        super().__init__(fan_in, 2, bias=False)
        nn.init.constant_(self.weight, 1e20)


@pytest.mark.parametrize(
    ("model", "value", "dtype", "large"),
    [
        (Square(), 1e20, torch.float32, "input[0] of the model itself (Square) reaches 1.00e+20"),
        (Square(), 1e20, torch.bfloat16, "input[0] of the model itself (Square) reaches"),
        (Square(), 1e200, torch.float64, "input[0] of the model itself (Square) reaches 1.00e+200"),
        (Sum(), 3e38, torch.float32, "input[0] of the model itself (Sum) reaches 3.00e+38"),
        (Cancelled(), 1e20, torch.float32, "input[0] of the model itself (Cancelled) reaches 1.00e+20"),
        (Huge(4), 1e19, torch.float32, "weight of the model itself (Huge) reaches 1.00e+20"),
        (nn.Sequential(nn.Identity(), Huge(4)), 1e19, torch.float32, "weight of 1 (Huge) reaches 1.00e+20"),
        (Outer(), 1.0, torch.float32, "output of first (Scale) reaches 1.00e+25"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value)[:12],
)
def test_a_product_or_sum_that_overflows_is_explained_as_one(
    capsys: Out, model: nn.Module, value: float, dtype: torch.dtype, large: str
) -> None:
    with DebugUnderflowOverflow(model), pytest.raises(ValueError, match="inf/nan"):
        model(torch.full((2, 4), value, dtype=dtype))
    out = capsys.readouterr().out
    assert "Values have left the range of " in out
    assert f": {large}" in out
    assert "a product or sum of such values does not fit" in out
    assert not re.search("division|exponential|logarithm|masked", out), out


class Inverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 / (x - x)


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Power(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**40


@pytest.mark.parametrize("model", [Inverse(), Exponential(), Power(), Scale(1e38)])
def test_without_large_values_each_possible_cause_is_named(capsys: Out, model: nn.Module) -> None:
    with DebugUnderflowOverflow(model), pytest.raises(ValueError, match="inf/nan"):
        model(torch.full((2, 4), 100.0))
    out = capsys.readouterr().out
    assert "Values have left" not in out
    for cause in ("product, power or sum beyond 3.40e+38", "exponential", "division by zero"):
        assert cause in out


def test_a_gradient_that_overflows_by_a_product_is_explained_as_one(capsys: Out) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scale(1e25), nn.Identity())
    with DebugUnderflowOverflow(model):
        loss = model(torch.ones(1, 4)).sum() * 1e20
        with pytest.raises(ValueError, match="inf/nan"):
            loss.backward()
    out = capsys.readouterr().out
    assert "Values have left the range of fp32 (largest 3.40e+38): grad_output[0] of " in out
    assert "a product or sum of such values does not fit" in out
    assert not re.search("root|division", out), out
