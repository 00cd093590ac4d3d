"""Gradients that are not finite on one rank only, ranks that fail, and metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import (
    Accelerator,
    DataLoaderConfiguration,
    NumericsError,
    UsageError,
)
from lockstep.blackbox.read import read_all
from lockstep.testing import run_ranks
from tests.distributed.row_sharding.strategy import SameSamplesAccelerator, ShardingAccelerator
from tests.distributed.row_sharding.test_training import BATCH, Net, data, plainly, same


class NanInOneRow(torch.autograd.Function):
    """Passes weights on; where it is on, the gradient of the first row is NaN."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, on: bool) -> Tensor:
        ctx.on = on
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        if ctx.on:
            gradient[0] = float("nan")
        return gradient, None


class Spoilt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 6, bias=False)
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        return x @ NanInOneRow.apply(self.layer.weight, self.on).t()


def spoilt(policy: str, clip: bool, precision: str) -> tuple[list[bool], list[bool], list[bool], str]:
    """Of three updates, of which the second has a NaN in rank 0's rows: which shards had one, were skipped, moved."""
    accelerator = ShardingAccelerator(nan_policy=policy, mixed_precision=precision)
    net = Spoilt()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    had, skipped, moved, raised = [], [], [], ""
    for place in range(3):
        net.on = place == 1
        before = net.layer.weight.detach().clone()
        accelerator.backward(net(torch.ones(2, 4)).mean())
        had.append(bool(net.layer.weight.grad.isnan().any()))
        if clip:
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
        try:
            optimizer.step()
        except NumericsError as error:
            raised = str(error)
        skipped.append(accelerator.optimizer_step_was_skipped)
        moved.append(not torch.equal(before, net.layer.weight.detach()))
        optimizer.zero_grad()
    assert bool(net.layer.weight.isfinite().all())
    return had, skipped, moved, raised


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("clip", [False, True])
def test_an_update_is_skipped_on_all_ranks_when_one_has_a_bad_row(clip: bool, ranks: int) -> None:
    results = run_ranks(spoilt, ranks, "skip", clip, "no")
    assert [had[1] for had, *_ in results] == [True] + [False] * (ranks - 1), "only one rank's rows are bad"
    for _, skipped, moved, _ in results:
        assert skipped == [False, True, False]
        assert moved == [True, False, True]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_stops(ranks: int) -> None:
    for *_, raised in run_ranks(spoilt, ranks, "stop", False, "no"):
        assert "nan_policy='stop': the gradient of update 2 is nan" in raised


def test_the_loss_scale_is_the_same_on_all_ranks() -> None:
    for _, skipped, moved, _ in run_ranks(spoilt, 2, "warn", False, "fp16"):
        assert skipped == [False, True, False]
        assert moved == [True, False, True]


# ---------------------------------------------------------------- nothing to learn from on one rank


def silent_rank() -> dict[str, Tensor]:
    """Rank 1 has no items in its batch: its loss is 0 / 0, and counts for nothing."""
    accelerator = ShardingAccelerator()
    net = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x, y = data().tensors
    mine = 0 if accelerator.process_index else 8
    loss = nn.functional.mse_loss(net(x[:8])[:mine], y[:mine])
    accelerator.backward(loss, num_items=mine)
    optimizer.step()
    return accelerator.get_state_dict(net)


def test_a_rank_without_items_adds_nothing() -> None:
    net = Net()
    x, y = data().tensors
    nn.functional.mse_loss(net(x[:8]), y[:8]).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for found in run_ranks(silent_rank, 2):
        same(found, net.state_dict())


# ---------------------------------------------------------------- recovery


class Failing(Net):
    """Raises in its second layer, or in backward, once."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.where == "in forward":
            self.where = ""
            raise ValueError("this rank fails in forward")
        if self.where == "in backward":
            self.where = ""
            hidden.register_hook(self._raise)
        return self.head(self.second(hidden) * self.scale)

    @staticmethod
    def _raise(_: Tensor) -> None:
        raise ValueError("this rank fails in backward")


def recovered(where: str, failing: int) -> tuple[dict[str, Tensor], list[list[str]]]:
    accelerator = ShardingAccelerator(scheduler_unit="update")
    net = Failing()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    net, optimizer, schedule, loader = accelerator.prepare(
        net, optimizer, schedule, DataLoader(data(), batch_size=BATCH // accelerator.num_processes)
    )
    failures = []

    def gradients(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        output = net(x)
        if net.where == "between":
            net.where = ""
            raise ValueError("this rank fails between")
        accelerator.backward(nn.functional.mse_loss(output, y))

    for epoch in range(2):
        for place, (x, y) in enumerate(loader):
            if (epoch, place) == (0, 1) and accelerator.process_index == failing:
                net.where = where
            while not (outcome := accelerator.agree(lambda x=x, y=y: gradients(x, y))).ok:
                failures.append([str(failure) for failure in outcome.failures])
            optimizer.step()
            schedule.step()
    return accelerator.get_state_dict(net), failures


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("where", ["in forward", "between", "in backward"])
def test_a_step_that_failed_on_one_rank_is_done_again(where: str, ranks: int) -> None:
    wanted, _ = plainly()
    for found, failures in run_ranks(recovered, ranks, where, ranks - 1):
        same(found, wanted)
        assert failures == [[f"rank {ranks - 1}: ValueError: this rank fails {where}"]]


# ---------------------------------------------------------------- samples


def metrics(shared: bool, dispatch: bool, count: int) -> tuple[int, list[int], list[str]]:
    kind: type[Accelerator] = SameSamplesAccelerator if shared else ShardingAccelerator
    accelerator = kind(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(count)), batch_size=4))
    batches, found, names = 0, [], []
    for (numbers,) in loader:
        batches += 1
        found += accelerator.gather_for_metrics(numbers).tolist()
        names += accelerator.gather_for_metrics([str(number) for number in numbers.tolist()])
    return batches, found, names


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_metrics_see_each_sample_once(ranks: int, shared: bool, dispatch: bool) -> None:
    for batches, found, names in run_ranks(metrics, ranks, shared, dispatch, 22):
        assert found == list(range(22))
        assert names == [str(number) for number in found]
        assert batches == (6 if shared else -(-22 // (4 * ranks)))


# ---------------------------------------------------------------- models that are sharded already


def sharded_by_torch(evaluates: bool) -> str:
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(net)
    if evaluates:
        return type(accelerator.prepare_model(net, evaluation_mode=True)).__name__
    with pytest.raises(UsageError) as caught:
        accelerator.prepare(net)
    return str(caught.value)


def test_a_model_that_is_sharded_already_is_refused_in_words() -> None:
    for text in run_ranks(sharded_by_torch, 2, False):
        assert "is sharded already: 0.weight is a DTensor" in text
    assert "Sequential" in run_ranks(sharded_by_torch, 2, True)[0]


# ---------------------------------------------------------------- the guard


def recorded() -> list[tuple[str, str]]:
    """What this rank's black box has of a step: names, and the lines of the script."""
    accelerator = ShardingAccelerator()
    net = accelerator.prepare(Net())
    accelerator.backward(net(torch.ones(2, 7)).mean())
    group = accelerator._state.group
    (box,) = [box for box in read_all(group.boxes) if box.rank == group.rank]
    return [(op.name, op.site.rpartition("/")[2].partition(":")[0]) for op in box.history]


def test_the_guard_knows_the_collectives_by_the_names_of_the_strategy() -> None:
    for found in run_ranks(recorded, 2):
        names = [name for name, _ in found]
        assert names.index("gathering rows") < names.index("backward of rows")
        assert ("backward of rows", "test_failures.py") in found
