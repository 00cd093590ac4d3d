"""Weights that differ between ranks are found, whatever made them differ; and what is meant to differ is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep import Accelerator, CheckpointError
from lockstep.testing import run_ranks
from tests.distributed.test_loader_ranks import notices

STEPS = 40
CAUSES = ("written on one rank", "unprepared optimizer")
INNOCENT = ("nothing", "statistics", "ignored", "local steps", "moved and moved back", "frozen")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.own = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x).sum() + self.own.sum()


def train(case: str, folder: str) -> tuple[str, str]:
    os.environ["LOCKSTEP_REPLICA_CHECK_STEPS"] = "4"
    try:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        net = Net()
        if case == "ignored":
            net._ddp_params_and_buffers_to_ignore = ["own"]  # type: ignore[assignment]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.part.parameters(), lr=0.01)
        second: torch.optim.Optimizer = torch.optim.SGD([net.own], lr=0.01)
        model = accelerator.prepare(net)
        if case != "unprepared optimizer":
            optimizer, second = accelerator.prepare(optimizer, second)
    finally:
        del os.environ["LOCKSTEP_REPLICA_CHECK_STEPS"]
    odd = accelerator.process_index == 1
    with notices() as text:
        for step in range(STEPS):
            batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + odd))
            before = net.own.detach().clone()
            with torch.no_grad():
                net.own.add_(1.0 if case == "moved and moved back" and odd else 0.0)
            if case == "local steps" and step < STEPS - 1:
                with accelerator.no_sync(model):
                    accelerator.backward(model(batch))
            else:
                accelerator.backward(model(batch))
            with torch.no_grad():
                net.own.copy_(before)
            if not (case == "unprepared optimizer" and odd and step == 5):
                optimizer.step()
                second.step()
            optimizer.zero_grad()
            second.zero_grad()
            if odd and step == 5:
                with torch.no_grad():
                    net.part[0].bias.add_(1.0 if case == "written on one rank" else 0.0)  # type: ignore[union-attr, operator]
                    net.frozen.add_(1.0 if case == "frozen" else 0.0)
                    net.own.add_(1.0 if case == "ignored" else 0.0)
        try:
            accelerator.save_state(folder)
            saved = "saved"
        except CheckpointError as error:
            saved = str(error)
    return text.getvalue(), saved


@pytest.mark.parametrize("case", CAUSES)
def test_it_is_found_once_and_not_committed(case: str, tmp_path: Path) -> None:
    (first, saved), (second, also) = run_ranks(train, 2, case, str(tmp_path / "state"))
    assert first.count("The weights are no longer the same on all ranks") == 1
    assert "rank 1 has other values than rank 0 in" in first
    assert "they were the same" in first
    assert "no longer the same" not in second
    assert "was not committed: the weights are not the same on all ranks: rank 1 has other" in saved
    assert saved == also
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("case", INNOCENT)
def test_what_may_differ_is_left_alone(case: str, tmp_path: Path) -> None:
    for text, saved in run_ranks(train, 2, case, str(tmp_path / "state")):
        assert "no longer the same" not in text
        assert saved == "saved"
