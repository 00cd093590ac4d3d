"""Prepared models, optimizers and schedulers that are copied, pickled and averaged, in the middle of an epoch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from lockstep import Accelerator
from lockstep.testing import run_ranks


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "copied": copy.deepcopy,
    "pickled": lambda item: pickle.loads(pickle.dumps(item)),
    "saved": saved_and_loaded,
    "averaged": AveragedModel,
    "EMA": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def equal_on_ranks(accelerator: Accelerator, tensors: list[Tensor]) -> bool:
    gathered = [accelerator.gather(tensor.detach()[None]) for tensor in tensors]
    return all(torch.equal(rows[0], row) for rows in gathered for row in rows)


def copy_models(ways: list[str], options: dict[str, Any], armed: bool) -> list[list[str]]:
    accelerator = Accelerator(cpu=True, **options)
    if armed:
        accelerator._session.group.enable_recovery()
    net = network()
    data = torch.randn(48, 4, generator=torch.Generator().manual_seed(4))
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, batch_size=4)
    )
    problems = []
    for step, batch in enumerate(loader):
        accelerator.backward(model(batch).pow(2).mean())
        if step == 2:
            for way in ways:
                problems.append(try_copy(accelerator, model, net, batch, way))
        optimizer.step()
        optimizer.zero_grad()
    return problems


def try_copy(accelerator: Accelerator, model: nn.Module, net: nn.Module, batch: Tensor, way: str) -> list[str]:
    before = [parameter.grad.clone() for parameter in net.parameters()]  # type: ignore[union-attr]
    made = WAYS[way](model)
    problems = []
    names = list(made.state_dict())
    prefix = "module." if way in ("averaged", "EMA") else ""
    if [name for name in names if name != "n_averaged"] != [f"{prefix}{name}" for name in model.state_dict()]:
        problems.append(f"{way}: names {names}")
    for name, theirs in model.state_dict().items():
        if not torch.equal(made.state_dict()[f"{prefix}{name}"], theirs):
            problems.append(f"{way}: {name} differs")
    for parameter in made.parameters():
        parameter.grad = None
    for _ in range(2):
        made(batch).pow(2).mean().backward()
    if not equal_on_ranks(accelerator, [parameter.grad for parameter in made.parameters()]):
        problems.append(f"{way}: its gradients are not averaged")
    if not all(torch.equal(one, p.grad) for one, p in zip(before, net.parameters(), strict=True)):
        problems.append(f"{way}: the original's gradients have changed")
    made.eval()
    with torch.no_grad():
        made(batch)  # gives all ranks rank 0's statistics
    if not equal_on_ranks(accelerator, list(made.buffers())):
        problems.append(f"{way}: buffers differ between ranks")
    if isinstance(made, AveragedModel):
        made.update_parameters(model)
        made.update_parameters(model)
    return problems


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("options", "armed"),
    [({}, False), ({"mixed_precision": "bf16"}, True), ({"debug": "underflow_overflow"}, False)],
    ids=["plain", "bf16, failures survived", "detector"],
)
def test_a_prepared_model_can_be_copied(world_size: int, options: dict[str, Any], armed: bool) -> None:
    for problems in run_ranks(copy_models, world_size, list(WAYS), options, armed and world_size > 1):
        assert problems == [[]] * len(WAYS)


def copy_on_main() -> float:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(4, 1))
    if accelerator.is_main_process:
        averaged = AveragedModel(model)
        averaged.update_parameters(model)
        with torch.no_grad():
            averaged(torch.ones(2, 4))
    accelerator.backward(model(torch.ones(2, 4)).mean())
    return accelerator.reduce(torch.ones(1)).item()


def test_the_main_process_may_copy_alone() -> None:
    assert run_ranks(copy_on_main, 2) == [2, 2]


def copy_optimizers(way: str, precision: str) -> list[Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = DataLoader(torch.ones(32, 4), batch_size=2)
    model, optimizer, schedule, loader = accelerator.prepare(net, optimizer, schedule, loader)
    seen: list[Any] = []
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step in (2, 3):  # within a window, and after it
            copied, copied_schedule = WAYS[way]((optimizer, schedule))
            seen.append(
                [copied.param_groups[0]["lr"], copied_schedule.get_last_lr(), copied.state_dict()["param_groups"]]
            )
            if step == 3:
                if precision == "fp16" and way == "pickled":
                    copied._scaler.scale(torch.ones(1))  # its own one, which torch wants to be used first
                for parameter in copied.parameters():
                    parameter.grad = torch.ones_like(parameter) * (65536.0 if precision == "fp16" else 1.0)
                start = copied.parameters()[0].detach().clone()
                copied.step()
                seen.append(bool((copied.parameters()[0] != start).all()))
                seen.append(copied.step_was_skipped)
    return seen


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("way", ["copied", "pickled"])
def test_prepared_optimizers_and_schedulers_can_be_copied(way: str, precision: str) -> None:
    for seen in run_ranks(copy_optimizers, 2, way, precision):
        (within, _, _), (after, last, groups), stepped, skipped = seen
        assert (within, after, last, groups[0]["lr"]) == (0.25, 0.0625, [0.0625], 0.0625)
        assert stepped
        assert not skipped
