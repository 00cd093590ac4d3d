"""What is said of a lack of memory that nobody caught: what is large by module, and the two remedies that fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Accelerator
from lockstep.errors import OutOfMemory, PeerFailure
from lockstep.launch.failure_report import Exit, render_report
from lockstep.memory.batch_size import find_executable_batch_size
from lockstep.memory.oom_report import advise
from lockstep.rundir.crash_report import from_exception
from lockstep.terminal.failure_box import plain

pytestmark = pytest.mark.usefixtures("alone")
CUDA = "CUDA out of memory. Tried to allocate 1.50 GiB."


class Net(nn.Module):
    """One layer of 1 MiB, and a forward that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(512, 512, bias=False)
        self.error: str | None = CUDA

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(x)
        if self.error is not None:
            raise RuntimeError(self.error)
        return hidden


def said(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return str(advise(error))
    raise AssertionError("nothing failed")


def remedies(text: str) -> list[str]:
    return [line.strip() for line in text.partition("Fix: ")[2].splitlines()]


def prepared(batch_size: int | None = 8, **options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, **options)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    if batch_size is not None:
        accelerator.prepare(DataLoader(list(range(16)), batch_size=batch_size))
    return accelerator, model, optimizer


def test_the_whole_of_it() -> None:
    accelerator, model, optimizer = prepared(gradient_accumulation_steps=3)
    model.error = None
    accelerator.backward(model(torch.ones(4, 512)).mean())
    optimizer.step()
    model.error = CUDA
    text = said(lambda: model(torch.ones(4, 512)))
    lines = text.splitlines()
    assert lines[0].startswith("Out of memory on rank 0 (host) at ")
    assert ": tried to allocate 1.5 GiB, " in lines[0]
    assert lines[2].strip() == "3.0 MiB  wide (weights 1.0 MiB, gradients 1.0 MiB, optimizer 1.0 MiB)" or (
        lines[2].strip() == "4.0 MiB  wide (weights 1.0 MiB, gradients 1.0 MiB, optimizer 2.0 MiB)"
    )
    assert lines[3].strip().startswith("8.0 KiB  ")
    assert "hidden [4, 512] float32, in Net.forward (test_oom_report.py:" in text
    assert len(remedies(text)) == 2
    assert "batch_size=4, gradient_accumulation_steps=6" in remedies(text)[0]


def test_remedies_are_those_of_the_run() -> None:
    _, model, _ = prepared(batch_size=None)
    ones = torch.ones(1, 512)
    assert remedies(said(lambda: model(ones)))[0].startswith("1. Compute in half precision")
    assert remedies(said(lambda: model(ones)))[1].startswith("2. Compute activations again")
    model.eval()
    assert remedies(said(lambda: model(ones)))[0].startswith("1. Evaluate under torch.no_grad()")
    model.train()
    model.error = (
        f"{CUDA} If reserved by PyTorch but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: 2.00 GiB is reserved by PyTorch but unallocated"
    )
    assert "expandable_segments:True" in remedies(said(lambda: model(ones)))[0]


def test_while_reading_data() -> None:
    class Data(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise MemoryError

    loader = DataLoader(Data(range(4)), batch_size=2)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader)
    assert "while data was read" in remedies(said(lambda: next(iter(loader))))[0]


def test_in_half_precision_that_is_not_advised() -> None:
    _, model, _ = prepared(mixed_precision="bf16", batch_size=None)
    assert "half precision" not in said(lambda: model(torch.ones(1, 512)))


def test_before_there_is_anything() -> None:
    text = str(advise(MemoryError()))
    assert text.startswith("Out of memory on rank 0 (host): the size of the request is not known, ")
    assert "has not been prepared yet" in text


def test_nothing_is_said_of_others() -> None:
    assert advise(ValueError("CUDA out of memory")) is None
    assert advise(PeerFailure("Rank 1 failed: MemoryError. While averaging gradients, it has left the job.")) is None


def test_last_words_carry_it() -> None:
    Accelerator(cpu=True)
    try:
        raise MemoryError("Unable to allocate 7.00 GiB for an array")
    except MemoryError as error:
        words = from_exception(type(error), error, error.__traceback__, rank=3, local_rank=1)
    assert "tried to allocate 7.0 GiB" in words.lead
    assert from_exception(ValueError, ValueError("else"), None, rank=3, local_rank=1).lead == ""


@pytest.mark.parametrize(("how", "models"), [("batch size", "none"), ("batch size", "prepared"), ("parts", "prepared")])
def test_when_no_size_fits_the_screen_has_it(how: str, models: str) -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = Net()
    if models != "none":
        model = accelerator.prepare(model)

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        model(torch.ones(batch_size, 512))

    try:
        if how == "batch size":
            train()
        else:
            accelerator.auto_microbatch(torch.ones(1, 512), lambda part: model(part).sum())
    except OutOfMemory as error:
        words = from_exception(type(error), error, error.__traceback__, rank=0, local_rank=0)
    report = render_report([Exit(rank=0, code=1, pid=words.pid)], [words], logs=Path("logs"))
    screen = " ".join(plain(report.box).split())
    last = words.traceback.rstrip().splitlines()[-1]  # without a launcher, too
    if how == "batch size":
        assert last.endswith("No batch size fits: 4, 2, 1 were tried.")
        assert "No batch size fits: 4, 2, 1 were tried." in screen
    else:
        assert "even parts of 1 sample do not fit: rank 0 ran out of memory" in last
        assert "even parts of 1 sample do not fit: rank 0 ran out of memory" in screen
