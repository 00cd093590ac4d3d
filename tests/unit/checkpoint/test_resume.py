"""On one process: interrupted after any batch and resumed, a run ends as if it had not been; to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from tests.unit.checkpoint.runs import Run

pytestmark = pytest.mark.usefixtures("alone")
BATCHES = 10
"""In two epochs."""


def interrupted(folder: Path, *stops: int, **options: Any) -> Run:
    """A run that is given up after so many batches, and again, and then goes to its end."""
    save = {"blocking": options.pop("blocking", True)}
    for number, stop in enumerate(stops):
        run = Run(**options)
        if number:
            run.accelerator.load_state(folder)
        run.train(stop)
        run.accelerator.save_state(folder, durable=False, **save)
        run.train(2)  # what was done after the save is lost, and must not get into it
        run.accelerator.wait_for_checkpoint()
    last = Run(**options)
    last.accelerator.load_state(folder)
    return last.train()


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return Run().train().result()


@pytest.mark.parametrize("stop", range(1, BATCHES + 1))
def test_after_any_batch(tmp_path: Path, expected: dict[str, Any], stop: int) -> None:
    assert interrupted(tmp_path / "state", stop).result() == expected


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(1, BATCHES - 2), second=st.integers(1, BATCHES - 2), blocking=st.booleans())
def test_after_a_second_time(tmp_path: Path, expected: dict[str, Any], first: int, second: int, blocking: bool) -> None:
    second = min(second, BATCHES - first)
    assert interrupted(tmp_path / "state", first, second, blocking=blocking).result() == expected


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.integers(1, 6), samples=st.integers(4, 13), stop=st.integers(1, 12))
def test_any_window_and_length(tmp_path: Path, steps: int, samples: int, stop: int) -> None:
    options = {"gradient_accumulation_steps": steps, "samples": samples + samples % 2}  # batch norm wants two samples
    stop = min(stop, samples)
    assert interrupted(tmp_path / "state", stop, **options).result() == Run(**options).train().result()


def test_weighted_windows_too(tmp_path: Path) -> None:
    """The items that an open window stands for are part of the state."""

    def run(stop: int | None, folder: Path | None) -> Any:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        loader = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        if folder is not None and stop is None:
            accelerator.load_state(folder)
        for number, (inputs,) in enumerate(loader, 1):
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).pow(2).mean(), num_items=7 + int(loader.sample_ids[0]))
                optimizer.step()
                optimizer.zero_grad()
            if number == stop:
                accelerator.save_state(folder)
                return None
        return model.weight.tolist()

    expected = run(None, None)
    for stop in range(1, 12):
        run(stop, tmp_path / "state")
        assert run(None, tmp_path / "state") == expected, stop


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions(tmp_path: Path, precision: str) -> None:
    from lockstep.state import AcceleratorState

    AcceleratorState._reset_state()
    options = {"mixed_precision": precision}
    assert interrupted(tmp_path / "state", 4, **options).result() == Run(**options).train().result()
    assert (tmp_path / "state" / "scaler.pt").exists() == (precision == "fp16")


def test_weights_that_are_bf16_themselves_and_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.outer = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.outer.weight = self.inner.weight

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(inputs))

    def made() -> tuple[Accelerator, Any, Any]:
        accelerator = Accelerator(cpu=True)
        model = Tied()
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    accelerator, model, optimizer = made()
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum())
        optimizer.step()
    accelerator.save_state(tmp_path / "state")
    again, other, other_optimizer = made()
    again.load_state(tmp_path / "state")
    assert other.inner.weight is other.outer.weight
    assert other.inner.weight.dtype == torch.bfloat16
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert torch.equal(one["momentum_buffer"], two["momentum_buffer"])
        assert two["momentum_buffer"].dtype == torch.bfloat16


class Projected(torch.optim.Optimizer):
    """Keeps its moments in fewer dimensions than the parameters have, as optimizers that project gradients do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                projected = parameter.grad.sum(0, keepdim=True)
                moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(projected))
                moment.mul_(0.9).add_(projected)
                parameter.sub_(group["lr"] * moment)


def test_an_optimizer_with_moments_of_another_shape(tmp_path: Path) -> None:
    def run() -> tuple[Accelerator, nn.Module, Any]:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(3, 2, bias=False)
        return accelerator, *accelerator.prepare(model, Projected(model.parameters()))

    accelerator, model, optimizer = run()
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "state", durable=False)
    resumed, again, optimizer = run()
    resumed.load_state(tmp_path / "state")
    assert torch.equal(again.weight, model.weight)
    assert optimizer.state[again.weight]["exp_avg"].shape == (1, 3)
