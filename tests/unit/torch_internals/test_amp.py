"""torch.amp's loss scaler, on the CPU."""

from __future__ import annotations

import torch

from lockstep.torch_internals import amp


def test_gradients_are_unscaled_once_and_an_optimizer_is_forgotten() -> None:
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(parameter.sum()).backward()
    assert amp.has_scaled_gradients(scaler, optimizer)
    scaler.unscale_(optimizer)
    assert not amp.has_scaled_gradients(scaler, optimizer)
    assert parameter.grad is not None
    assert parameter.grad.item() == 1.0
    amp.forget_optimizers(scaler)
    assert amp.has_scaled_gradients(scaler, optimizer)


def test_the_flags_say_what_a_step_drops() -> None:
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    (flag,) = amp.overflow_flags(scaler, optimizer)
    assert flag.item() == 0
    flag.fill_(1.0)
    scaler.step(optimizer)
    assert parameter.item() == 1.0
