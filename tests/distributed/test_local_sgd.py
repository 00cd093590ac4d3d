"""Local SGD on two ranks: weights meet when they should, and nobody calls the steps between a divergence."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from lockstep import Accelerator, ConfigError, LocalSGD, UsageError
from lockstep.testing import run_ranks
from lockstep.training import local_sgd as module
from tests.distributed.test_loader_ranks import notices


def made() -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    os.environ["LOCKSTEP_REPLICA_CHECK_STEPS"] = "1"
    try:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    finally:
        del os.environ["LOCKSTEP_REPLICA_CHECK_STEPS"]
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    data = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * seed + accelerator.process_index))
    accelerator.backward(model(data).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def train(chunk: int) -> tuple[list[list[float]], str, str]:
    module._CHUNK = chunk
    accelerator, model, optimizer = made()
    seen = []
    with notices() as inside:
        with LocalSGD(accelerator, model, local_sgd_steps=3) as local:
            for number in range(7):
                step(accelerator, model, optimizer, number)
                local.step()
                seen.append(weights(model))
        seen.append(weights(model))
        for number in range(4):  # gradients are averaged again
            step(accelerator, model, optimizer, 100 + number)
            seen.append(weights(model))
    with notices() as after:
        for number in range(6):
            if accelerator.process_index == 1:
                with torch.no_grad():
                    next(model.parameters()).add_(1.0)
            step(accelerator, model, optimizer, 200 + number)
            accelerator.wait_for_everyone()
    return seen, inside.getvalue(), after.getvalue()


@pytest.mark.parametrize("chunk", [1, 1 << 20], ids=["in parts", "in one"])
def test_the_weights_meet(chunk: int) -> None:
    first, second = run_ranks(train, 2, chunk)
    equal = [mine == other for mine, other in zip(first[0], second[0], strict=True)]
    assert equal == [False, False, True, False, False, True, False, True, True, True, True, True]
    assert first[1] == second[1] == ""
    # Ranks that diverge later are found: the comparison is on again.
    assert "The weights are no longer the same on all ranks" in first[2]


def interrupted() -> str:
    accelerator, model, optimizer = made()
    try:
        with LocalSGD(accelerator, model, local_sgd_steps=3) as local:
            step(accelerator, model, optimizer, 1)
            local.step()
            raise RuntimeError("of the script's")
    except RuntimeError as error:
        text = str(error)
    step(accelerator, model, optimizer, 2)  # gradients are averaged again, whatever the weights
    return text


def test_an_error_inside_is_not_followed_by_an_average() -> None:
    assert run_ranks(interrupted, 2) == ["of the script's"] * 2


def refused() -> list[str]:
    accelerator, model, _ = made()
    found = []
    for arguments, kind in (((model, 0), ConfigError), ((model, 2.5), ConfigError), ((nn.Linear(1, 1), 2), UsageError)):
        with pytest.raises(kind) as caught:
            LocalSGD(accelerator, *arguments)  # type: ignore[arg-type]
        found.append(str(caught.value))
    LocalSGD(accelerator, nn.Linear(1, 1), 2, enabled=False)
    return found


def test_what_cannot_be() -> None:
    for found in run_ranks(refused, 2):
        assert found[0] == "local_sgd_steps=0 must be a whole number, 1 or more."
        assert "2.5" in found[1]
        assert "has not prepared" in found[2]


def test_one_process_does_nothing(alone: None) -> None:
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    with LocalSGD(accelerator, model, 1) as local:
        local.step()
    assert not local.enabled
    assert local.num_steps == 1
