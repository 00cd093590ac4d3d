"""fp16's dynamic loss scaling, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lockstep import Accelerator, GradScalerKwargs

pytestmark = pytest.mark.usefixtures("alone")


def started(window: int = 1, **scaler: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_steps=window,
        kwargs_handlers=[GradScalerKwargs(**{"init_scale": 256.0, **scaler})],
    )
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def one_step(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, value: float) -> None:
    accelerator.backward(model(torch.ones(1, 1)).sum() * value)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def test_gradients_are_scaled_until_the_step() -> None:
    accelerator, model, optimizer, _ = started()
    before = model.weight.item()
    accelerator.backward(model(torch.ones(1, 1)).sum() * 2)
    assert model.weight.grad.item() == pytest.approx(512.0)
    optimizer.step()
    assert model.weight.item() == pytest.approx(before - 2.0, abs=1e-3)
    assert not accelerator.optimizer_step_was_skipped


def test_an_overflow_skips_the_step() -> None:
    accelerator, model, optimizer, scheduler = started()
    before = model.weight.item()
    one_step(accelerator, model, optimizer, scheduler, 1e30)
    assert accelerator.optimizer_step_was_skipped
    assert optimizer.step_was_skipped
    assert model.weight.item() == before
    assert scheduler.last_epoch == 0
    assert accelerator.scaler.get_scale() == 128.0
    one_step(accelerator, model, optimizer, scheduler, 1.0)
    assert not accelerator.optimizer_step_was_skipped
    assert model.weight.item() == pytest.approx(before - 1.0, abs=1e-3)
    assert scheduler.last_epoch == 1
    assert accelerator.scaler.get_scale() == 128.0


def test_options_are_honoured() -> None:
    accelerator, *parts = started(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    assert isinstance(accelerator.scaler, torch.amp.GradScaler)
    assert accelerator.scaler.get_scale() == 8.0
    one_step(accelerator, *parts, 1e30)
    assert accelerator.scaler.get_scale() == 2.0
    one_step(accelerator, *parts, 1.0)
    one_step(accelerator, *parts, 1.0)
    assert accelerator.scaler.get_scale() == 8.0


def test_scaling_can_be_switched_off() -> None:
    accelerator, model, optimizer, _ = started(enabled=False)
    accelerator.backward(model(torch.ones(1, 1)).sum() * 2)
    assert model.weight.grad.item() == pytest.approx(2.0)
    assert accelerator.clip_grad_norm_(model.parameters(), 100.0).item() == pytest.approx(2.0)
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped


def test_there_is_none_in_other_precisions() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.scaler is None
    assert not accelerator.optimizer_step_was_skipped


def test_clipping_gives_the_unscaled_norm_and_clips_to_it() -> None:
    accelerator, model, optimizer, _ = started()
    before = model.weight.item()
    accelerator.backward(model(torch.ones(1, 1)).sum() * 8)
    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=0.5)
    assert norm.item() == pytest.approx(8.0, rel=1e-3)
    assert accelerator.clip_grad_norm_(model.parameters(), max_norm=0.5).item() == pytest.approx(0.5, rel=1e-3)
    optimizer.step()
    assert model.weight.item() == pytest.approx(before - 0.5, abs=1e-3)


def test_clipping_values() -> None:
    accelerator, model, optimizer, _ = started()
    before = model.weight.item()
    accelerator.backward(model(torch.ones(1, 1)).sum() * 8)
    accelerator.clip_grad_value_(model.parameters(), 0.25)
    optimizer.step()
    assert model.weight.item() == pytest.approx(before - 0.25, abs=1e-3)


def test_clipping_inside_a_window_tells_the_norm_and_leaves_the_gradients() -> None:
    accelerator, model, *_ = started(window=2)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum() * 8)
        norm = accelerator.clip_grad_norm_(iter(model.parameters()), max_norm=0.5)
        assert norm.item() == pytest.approx(4.0, rel=1e-3)
        accelerator.clip_grad_value_(model.parameters(), 0.5)
        assert model.weight.grad.item() == pytest.approx(8 / 2 * 256)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum() * 8)
        assert accelerator.clip_grad_norm_(model.weight, max_norm=0.5).item() == pytest.approx(8.0, rel=1e-3)
        assert model.weight.grad.item() == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_clipping_without_a_scale(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    accelerator.backward(model(torch.ones(1, 1)).sum() * 8)
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(8.0)
    assert model.weight.grad.item() == pytest.approx(1.0, rel=1e-4)


def two(window: int = 1) -> tuple[Accelerator, list[Any], list[Any]]:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_steps=window,
        kwargs_handlers=[GradScalerKwargs(init_scale=16.0)],
    )
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    return accelerator, list(accelerator.prepare(*models)), list(accelerator.prepare(*optimizers))


@pytest.mark.parametrize("clips", ["both first", "each before its step"])
def test_two_optimizers_are_unscaled_once_each(clips: str) -> None:
    accelerator, models, optimizers = two()
    before = [model.weight.item() for model in models]
    accelerator.backward(sum(model(torch.ones(1, 1)).sum() for model in models))
    if clips == "both first":
        for model in models:
            assert accelerator.clip_grad_norm_(model.parameters(), 100.0).item() == pytest.approx(1.0)
        for optimizer in optimizers:
            optimizer.step()
    else:
        for model, optimizer in zip(models, optimizers, strict=True):
            assert accelerator.clip_grad_norm_(model.parameters(), 100.0).item() == pytest.approx(1.0)
            optimizer.step()
    after = [model.weight.item() for model in models]
    assert [new - old for new, old in zip(after, before, strict=True)] == pytest.approx([-1.0, -1.0], abs=1e-3)


@pytest.mark.parametrize("window", [1, 2])
def test_two_models_that_take_turns(window: int) -> None:
    """A GAN: backward, clip and step of the one, then of the other, in one micro-batch."""
    accelerator, models, optimizers = two(window)
    before = [model.weight.item() for model in models]
    for _ in range(window):
        with accelerator.accumulate(*models):
            for model, optimizer in zip(models, optimizers, strict=True):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                if accelerator.sync_gradients:
                    assert accelerator.clip_grad_norm_(model.parameters(), 100.0).item() == pytest.approx(1.0)
                optimizer.step()
                optimizer.zero_grad()
    after = [model.weight.item() for model in models]
    assert [new - old for new, old in zip(after, before, strict=True)] == pytest.approx([-1.0, -1.0], abs=1e-3)


def test_an_overflow_of_one_does_not_stop_the_other() -> None:
    accelerator, models, optimizers = two()
    before = models[1].weight.item()
    accelerator.backward(models[0](torch.ones(1, 1)).sum() * 1e30 + models[1](torch.ones(1, 1)).sum())
    for optimizer in optimizers:
        optimizer.step()
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [True, False]
    assert accelerator.optimizer_step_was_skipped
    assert models[1].weight.item() == pytest.approx(before - 1.0, abs=1e-3)
    assert accelerator.scaler.get_scale() == 8.0


def test_training_in_fp16_reaches_what_fp32_reaches() -> None:
    torch.manual_seed(0)
    inputs, wanted = torch.randn(64, 4), torch.randn(4, 1)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    model = nn.Linear(4, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(60):
        for batch in inputs.split(32):
            with accelerator.accumulate(model):
                accelerator.backward((model(batch) - batch @ wanted).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                optimizer.zero_grad()
    assert (model.weight.detach().T - wanted).abs().max().item() < 2e-2
