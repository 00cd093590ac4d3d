"""The forward of a model on several ranks: under a profiler, copied, compiled, and while DDP makes new buckets."""

from __future__ import annotations

import copy
import io
import pickle
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from lockstep.testing import run_ranks


def trained(profiling: bool) -> tuple[torch.Tensor, set[str]]:
    """Weights after an epoch, and what a profiler was told."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = TensorDataset(torch.arange(160.0).view(40, 4).sin())
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.Adam(net.parameters()), DataLoader(data, batch_size=4, shuffle=True)
    )
    with profile(activities=[ProfilerActivity.CPU]) if profiling else nullcontext() as seen:
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    names = set() if seen is None else {event.key for event in seen.key_averages()}
    assert all(parameter.grad is None for parameter in net.parameters())
    return torch.cat([tensor.flatten() for tensor in net.state_dict().values()]), names


def test_the_result_is_the_same_and_a_profiler_sees_the_usual_names() -> None:
    plain, profiled = run_ranks(trained, 2, False), run_ranks(trained, 2, True)
    for (mine, _), (theirs, names) in zip(plain, profiled, strict=True):
        assert torch.equal(mine, theirs)
        assert "DistributedDataParallel.forward" in names
        assert "Optimizer.zero_grad#Adam.zero_grad" in names
        assert "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__" in names


def copies() -> list[tuple[str, bool]]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum()
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(kept, weights_only=False)]
    same = model(torch.ones(1, 2))
    return [(type(one).__module__, torch.equal(one(torch.ones(1, 2)), same)) for one in made]


def test_copies_and_pickles_are_torchs_own() -> None:
    for found in run_ranks(copies, 2):
        assert found == [("torch.nn.parallel.distributed", True)] * 3


def compiled_afterwards() -> list[float]:
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(2, 1, bias=False)
    net.register_buffer("shared", torch.zeros(1))  # which travels before each forward
    nn.init.ones_(net.weight)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    quick = torch.compile(model, backend="eager")
    for _ in range(3):
        accelerator.backward(quick(torch.full((1, 2), accelerator.process_index + 1.0)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.flatten().tolist()


def test_a_prepared_model_can_be_compiled() -> None:
    for weights in run_ranks(compiled_afterwards, 2):
        assert weights == pytest.approx([0.55, 0.55])


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.began: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.began.append(time.monotonic())
        return self.inner(x)


def around_new_buckets(late: int) -> tuple[list[float], list[float]]:
    """When each forward began, and when DDP was done with what it does ahead of it, slowly so on one rank."""
    accelerator = Accelerator(cpu=True)
    net, done = Noting(), []
    model = accelerator.prepare(net)
    plain = DistributedDataParallel._pre_forward

    def slow(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if accelerator.process_index == late:
            time.sleep(0.5)
        made = plain(self, *inputs, **kwargs)
        done.append(time.monotonic())
        return made

    DistributedDataParallel._pre_forward = slow
    try:
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 2)).sum())
    finally:
        DistributedDataParallel._pre_forward = plain
    return net.began, done


@pytest.mark.parametrize("late", [0, 1])
def test_no_rank_goes_on_before_all_have_new_buckets(late: int) -> None:
    # DDP agrees on them ahead of the second forward, in a call that cannot be left should a rank fail meanwhile.
    results = run_ranks(around_new_buckets, 2, late)
    assert min(began[1] for began, _ in results) >= max(done[1] for _, done in results)
