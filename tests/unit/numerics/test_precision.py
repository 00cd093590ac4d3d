"""One module in fp32, whatever the rest is computed in."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lockstep import ConfigError
from lockstep.debug_utils import run_in_fp32


class Loud(nn.Module):
    """Overflows fp16 inside, and in what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.dense.weight, 300.0)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.dense(x) if scale is None else self.dense(x) * scale
        return y, {"small": y / 1e4}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.loud, self.last = nn.Linear(2, 2), Loud(), nn.Linear(2, 2)
        nn.init.constant_(self.first.weight, 100.0)

    def forward(self, x: Tensor) -> Tensor:
        y, more = self.loud(self.first(x))
        return self.last(y) + more["small"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_module_that_overflows_fp16_under_autocast_does_not_any_more(wrapped: bool) -> None:
    model = Model()
    x = torch.ones(1, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not model.loud(model.first(x))[0].isfinite().all()
        assert run_in_fp32(model, "loud") is model
        run_in_fp32(model, "loud")  # once is enough
        y, more = model.loud(model.first(x), scale=torch.tensor(1.0, dtype=torch.float16))
        assert y.isfinite().all()
        assert y.dtype is more["small"].dtype is torch.float32
        assert model.first(x).dtype is torch.float16  # the rest is as it was
        assert torch.is_autocast_enabled("cpu")
    assert model.loud.dense.weight.dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (torch.compile(model, backend="eager") if wrapped else model)(x).sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_in_a_model_of_half_precision_what_comes_out_is_cast() -> None:
    model = Model().to(torch.bfloat16)
    run_in_fp32(model, "loud")
    assert model.loud.dense.weight.dtype is torch.float32
    assert model(torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_a_copy_runs_its_own_parameters() -> None:
    model = run_in_fp32(Model(), "loud")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.loud.dense.weight.zero_()
    assert not other.loud(torch.ones(1, 2))[0].any()
    assert model.loud(torch.ones(1, 2))[0].all()


def test_unknown_names_are_told_all_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'loud.dens'.*Close to it: loud.dense.*'nothing'"):
        run_in_fp32(Model(), "loud.dens", "nothing")
    with pytest.raises(ConfigError, match="no module"):
        run_in_fp32(Model())
