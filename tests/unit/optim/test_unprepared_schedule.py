"""A scheduler that was not prepared, stepped inside accumulate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, StepLR

from lockstep import Accelerator

pytestmark = pytest.mark.usefixtures("alone")

REPORT = (
    "A learning rate scheduler that was not passed to prepare() was stepped in a micro-batch that completes no update"
)


def train(case: str, steps: int = 2, **options: Any) -> int:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    net = nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule: Any = None
    if case != "made for the prepared optimizer":
        schedule = (ConstantLR if case == "constant" else StepLR)(optimizer, 1)
    model, optimizer = accelerator.prepare(net, optimizer)
    if case == "made for the prepared optimizer":
        schedule = StepLR(optimizer, 1)
    if case == "prepared":
        schedule = accelerator.prepare(schedule)
    for _ in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).mean())
            optimizer.step()
            if case != "stepped when due" or accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        if case == "changed between the blocks":
            optimizer.param_groups[0]["lr"] *= 0.9
            schedule = type("Never", (), {"step": lambda self: None})()
    return int(getattr(schedule, "last_epoch", 0))


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("case", ["not prepared", "made for the prepared optimizer"])
def test_it_is_reported_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    assert train(case) == 8  # as on Accelerate
    found = [record.getMessage() for record in caplog.records if REPORT in record.getMessage()]
    assert len(found) == 1
    assert "it moves 2 times for each update" in found[0]
    assert "Pass it to prepare()" in found[0]


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("prepared", {}),
        ("prepared", {"step_scheduler_with_optimizer": False}),
        ("stepped when due", {}),
        ("not prepared", {"steps": 1}),
    ],
)
def test_what_is_right_is_left_alone(case: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    train(case, **options)
    assert REPORT not in caplog.text
