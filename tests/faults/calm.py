"""A script in which ranks wait for each other in ways that are in order: nothing may be said, let alone stopped.

Its argument names the parts that are run, with commas between; without it all but the slow ones are.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lockstep import Accelerator, DistributedOperationException
from lockstep.logging import get_logger

WAIT = 3.0
"""Longer than a rank may wait before the guard looks closer, and before it has made up its mind."""
accelerator = Accelerator(cpu=True)
odd = accelerator.process_index == accelerator.num_processes - 1
net = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))


def train(batches: Iterable[torch.Tensor], pauses: Iterable[float] = ()) -> None:
    waits = iter(pauses)
    for batch in batches:
        time.sleep(next(waits, 0.0))
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()


class Slow(Dataset[torch.Tensor]):
    """Its first sample takes a while on one rank."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if odd and index < 4:
            time.sleep(WAIT / 2)
        return torch.ones(4)


def slow_first_batch() -> None:
    train(accelerator.prepare(DataLoader(Slow(), batch_size=2)))


def uneven_steps() -> None:
    train([torch.ones(2, 4)] * 6, [0.0, 1.2, 0.0, 1.2] if odd else [1.2, 0.0, 0.1])


def join_uneven_inputs() -> None:
    with accelerator.join_uneven_inputs([model]):
        train([torch.ones(2, 4)] * (2 if odd else 5), () if odd else [WAIT / 3] * 5)


def log_in_order() -> None:
    if odd:
        get_logger("calm").warning("only here", main_process_only=False, in_order=True)
    accelerator.wait_for_everyone()


def evaluate_alone() -> None:
    end = time.monotonic() + WAIT
    while accelerator.is_main_process and time.monotonic() < end:
        with torch.no_grad():
            accelerator.unwrap_model(model)(torch.ones(512, 4))
    accelerator.wait_for_everyone()


def handle_for_later() -> None:
    handle = dist.all_reduce(torch.ones(2), async_op=not odd)
    if handle is not None:
        time.sleep(WAIT)
        handle.wait()


def caught_mismatch() -> None:
    checked = Accelerator(cpu=True, debug=True)
    try:
        checked.gather(torch.ones(3 if odd else 2))
    except DistributedOperationException:
        pass
    else:
        raise AssertionError
    Accelerator(cpu=True, debug=False)
    for _ in range(5):
        time.sleep(WAIT / 5)
        accelerator.gather(torch.ones(2))


def stop_signal() -> None:
    if odd:
        command = f"sleep 0.5; kill -STOP {os.getpid()}; sleep {WAIT}; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", command]) as helper:
            meet_until(lambda: helper.poll() is not None)
    else:
        meet_until(lambda: False)


def debugger() -> None:
    """A real one is attached to the rank, and holds it."""
    if odd:
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # let processes that are not its parents attach
        command = [sys.executable, str(Path(__file__).with_name("attach.py")), str(os.getpid()), str(WAIT)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tracer:
            meet_until(lambda: tracer.poll() is not None)
            said = tracer.stdout.read() if tracer.stdout is not None else ""
        sys.stdout.write(said)
        sys.stdout.flush()
    else:
        meet_until(lambda: False)


def meet_until(done: Callable[[], bool]) -> None:
    """Called on: all ranks. Collectives, until it is done on the odd rank."""
    while not bool(accelerator.reduce(torch.tensor(float(done())), "sum")):
        time.sleep(0.02)


def compile_on_one_rank() -> None:
    """With the real compiler, which takes several seconds."""

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(output @ output.T).softmax(-1).log().sum()

    loss = torch.compile(loss_of) if odd else loss_of
    began = time.monotonic()
    for _ in range(3):
        accelerator.backward(loss(model(torch.ones(8, 4))))
    if odd:
        sys.stdout.write(f"compiled in {time.monotonic() - began:.1f} s\n")


PARTS = {
    part.__name__: part
    for part in (
        *(slow_first_batch, uneven_steps, join_uneven_inputs, log_in_order, evaluate_alone),
        *(handle_for_later, caught_mismatch, stop_signal, debugger),
    )
}
SLOW_PARTS = {part.__name__: part for part in (compile_on_one_rank,)}

for name in sys.argv[1].split(",") if len(sys.argv) > 1 else PARTS:
    {**PARTS, **SLOW_PARTS}[name]()
    accelerator.wait_for_everyone()
    accelerator.print(f"done: {name}")
