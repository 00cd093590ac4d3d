"""Training with a strategy that nobody outside this folder knows: the same as one process of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, GradientAccumulationPlugin, UsageError
from lockstep.testing import run_ranks
from tests.distributed.row_sharding.strategy import ROWS, SameSamplesAccelerator, ShardingAccelerator

RANKS = (1, 2, 3)
SAMPLES, BATCH, EPOCHS = 36, 12, 2
"""A batch that 1, 2 and 3 ranks divide evenly."""


class Net(nn.Module):
    """Two layers with one weight, a scale without dimensions, a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 7, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(7, 1)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))) * self.scale)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 7, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def plainly(
    steps: int = 1, clip: Callable[[list[Tensor]], Any] = lambda _: None
) -> tuple[dict[str, Tensor], list[Any]]:
    """What one process of torch makes of it, with so many micro-batches to an update."""
    net = Net()
    optimizer = sgd(net)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    norms = []
    for _ in range(EPOCHS):
        x, y = data().tensors
        for xs, ys in zip(x.split(BATCH * steps), y.split(BATCH * steps), strict=True):
            nn.functional.mse_loss(net(xs), ys).backward()
            norms.append(clip(list(net.parameters())))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return net.state_dict(), norms


def prepared(accelerator: Accelerator, order: str, batch: int) -> tuple[Any, Any, Any, Any]:
    net = Net()
    optimizer = sgd(net)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(data(), batch_size=batch)
    if order == "together":
        return accelerator.prepare(net, optimizer, schedule, loader)
    if order == "optimizer first":
        optimizer, schedule, loader, net = accelerator.prepare(optimizer, schedule, loader, net)
    elif order == "optimizer in an earlier call":
        optimizer = accelerator.prepare(optimizer)
        net = accelerator.prepare(net)
        schedule, loader = accelerator.prepare(schedule, loader)
    elif order == "optimizer in a later call":
        net = accelerator.prepare(net)
        optimizer, schedule, loader = accelerator.prepare(optimizer, schedule, loader)
    elif order == "optimizer made of what was prepared":
        net = accelerator.prepare(net)
        optimizer = sgd(net)
        optimizer, loader = accelerator.prepare(optimizer, loader)
        schedule = accelerator.prepare(LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    return net, optimizer, schedule, loader


ORDERS = (
    "together",
    "optimizer first",
    "optimizer in an earlier call",
    "optimizer in a later call",
    "optimizer made of what was prepared",
)


def trained(
    order: str, same: bool = False, steps: int = 1, clip: str = "", **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    kind = SameSamplesAccelerator if same else ShardingAccelerator
    plugin = GradientAccumulationPlugin(num_steps=steps, **options)
    accelerator = kind(gradient_accumulation_plugin=plugin, scheduler_unit="update")
    parts = 1 if same else accelerator.num_processes
    net, optimizer, schedule, loader = prepared(accelerator, order, BATCH // parts)
    norms = []
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.mse_loss(net(x), y))
                if clip == "norm":
                    norms.append(accelerator.clip_grad_norm_(net.parameters(), 0.2).item())
                elif clip == "inf":
                    norms.append(accelerator.clip_grad_norm_(net.parameters(), 0.05, float("inf")).item())
                elif clip == "value":
                    accelerator.clip_grad_value_(net.parameters(), 0.02)
                if accelerator.sync_gradients is False:
                    norms = norms[:-1]
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())
    return {name: value.clone() for name, value in accelerator.get_state_dict(net).items()}, norms


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_preparing_trains_what_one_process_trains(order: str, ranks: int) -> None:
    wanted, _ = plainly()
    for found, _ in run_ranks(trained, ranks, order):
        same(found, wanted)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("each", [False, True])
def test_accumulated_gradients_are_those_of_the_whole_window(ranks: int, each: bool) -> None:
    wanted, _ = plainly(steps=3)
    for found, _ in run_ranks(trained, ranks, "together", steps=3, sync_each_batch=each):
        same(found, wanted)


def clip_by(kind: str) -> Callable[[list[Tensor]], Any]:
    if kind == "value":
        return lambda parameters: nn.utils.clip_grad_value_(parameters, 0.02)
    if kind == "inf":
        return lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05, float("inf")).item()
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.2).item()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["norm", "inf", "value"])
def test_clipping_is_that_of_all_gradients(kind: str, steps: int, ranks: int) -> None:
    wanted, norms = plainly(steps, clip_by(kind))
    for found, seen in run_ranks(trained, ranks, "together", steps=steps, clip=kind):
        same(found, wanted)
        if kind != "value":
            assert seen == pytest.approx(norms, abs=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_their_samples_train_what_one_process_trains(ranks: int) -> None:
    """Here the data-parallel size is 1, whatever the number of processes."""
    wanted, _ = plainly(steps=3)
    for found, _ in run_ranks(trained, ranks, "together", same=True, steps=3):
        same(found, wanted)


def counted(same: bool) -> tuple[int, int, str]:
    """By how much a schedule advances, how large a batch is on all ranks, and the line about the run."""
    accelerator = (SameSamplesAccelerator if same else ShardingAccelerator)()
    net, optimizer, schedule, loader = prepared(accelerator, "together", 4)
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()
    summary = accelerator._state.run_summary
    assert summary is not None
    return schedule.steps_per_update, loader.total_batch_size, summary.line()


@pytest.mark.parametrize("same", [False, True])
def test_schedules_and_batch_sizes_go_by_data_parallel_ranks(same: bool) -> None:
    size = 1 if same else 2
    for steps, batch, line in run_ranks(counted, 2, same):
        assert (steps, batch) == (size, 4 * size)
        assert f"effective batch {4 * size} (4 per process" in line


# ---------------------------------------------------------------- what is refused


def optimizer_of_another_model() -> str:
    accelerator = ShardingAccelerator()
    net, optimizer, loader = accelerator.prepare(Net(), sgd(Net()), DataLoader(data(), batch_size=4))
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(net(x), y))
        with pytest.raises(UsageError) as caught:
            optimizer.step()
        return str(caught.value)
    return ""


def test_an_optimizer_that_trains_nothing_is_an_error() -> None:
    (text,) = set(run_ranks(optimizer_of_another_model, 2))
    assert "SGD has no parameter of a prepared model" in text


def two_models() -> dict[str, Tensor]:
    """A generator's optimizer prepared before its model, a discriminator's after."""
    accelerator = ShardingAccelerator()
    one, two = Net(), nn.Linear(1, 1)
    nn.init.constant_(two.weight, 0.5)
    nn.init.zeros_(two.bias)
    optimizers = [sgd(one), torch.optim.SGD(two.parameters(), lr=0.1)]
    first = accelerator.prepare(optimizers[0])
    one, two = accelerator.prepare(one, two)
    second, loader = accelerator.prepare(
        optimizers[1], DataLoader(data(), batch_size=BATCH // accelerator.num_processes)
    )
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(two(one(x)), y))
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return {**accelerator.get_state_dict(one), **accelerator.get_state_dict(two)}


def test_several_models_and_optimizers_in_several_calls() -> None:
    net, last = Net(), nn.Linear(1, 1)
    nn.init.constant_(last.weight, 0.5)
    nn.init.zeros_(last.bias)
    optimizers = [sgd(net), torch.optim.SGD(last.parameters(), lr=0.1)]
    x, y = data().tensors
    for xs, ys in zip(x.split(BATCH), y.split(BATCH), strict=True):
        nn.functional.mse_loss(last(net(xs)), ys).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found in run_ranks(two_models, 2):
        same(found, {**net.state_dict(), **last.state_dict()})


def a_step_before_preparing() -> dict[str, Tensor]:
    accelerator = ShardingAccelerator()
    net = Net()
    optimizer = sgd(net)
    x, y = data().tensors
    nn.functional.mse_loss(net(x[:4]), y[:4]).backward()
    optimizer.step()
    optimizer.zero_grad()
    net, optimizer = accelerator.prepare(net, optimizer)
    assert all(hasattr(item, ROWS) for item in optimizer.optimizer.state if item.ndim)
    accelerator.backward(nn.functional.mse_loss(net(x), y))
    optimizer.step()
    return accelerator.get_state_dict(net)


def test_momentum_from_before_preparing_is_kept() -> None:
    net = Net()
    optimizer = sgd(net)
    x, y = data().tensors
    for xs, ys in ((x[:4], y[:4]), (x, y)):
        nn.functional.mse_loss(net(xs), ys).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(a_step_before_preparing, 3):
        same(found, net.state_dict())


def held_back_and_dropped() -> tuple[bool, float]:
    """Gradients of a forward under no_sync, which zero_grad drops; then those of another."""
    accelerator = ShardingAccelerator()
    net, optimizer = accelerator.prepare(nn.Linear(4, 2), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=1.0))
    with accelerator.no_sync(net):
        accelerator.backward(net(torch.full((1, 4), 100.0)).sum())
    held = any(parameter.grad is None for parameter in net.parameters())
    optimizer.zero_grad()
    accelerator.backward(net(torch.ones(1, 4)).sum())
    largest = max(parameter.grad.abs().max().item() for parameter in net.parameters() if parameter.grad.numel())
    return held, largest


def test_gradients_that_were_held_back_are_dropped_with_the_others() -> None:
    assert run_ranks(held_back_and_dropped, 2) == [(True, 1.0), (True, 1.0)]


def uneven() -> str:
    accelerator = ShardingAccelerator()
    net = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(UsageError) as caught, accelerator.join_uneven_inputs([net]):
        pass
    return str(caught.value)


def test_uneven_inputs_are_refused_with_the_reason() -> None:
    assert all("every forward gathers rows from all ranks" in text for text in run_ranks(uneven, 2))


def described() -> str:
    return repr(ShardingAccelerator())


def test_the_accelerator_shows_how_it_trains() -> None:
    assert all("rows of each parameter on 2 processes" in text for text in run_ranks(described, 2))
