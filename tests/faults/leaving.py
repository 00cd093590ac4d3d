"""Two ranks that torchrun has started, of which the last leaves while the other waits: ``leaving.py HOW``."""

from __future__ import annotations

import atexit
import os
import sys
import time

import torch

from lockstep import Accelerator

HOW = sys.argv[1]
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(layer := torch.nn.Linear(1, 1), torch.optim.SGD(layer.parameters(), lr=0.1))
accelerator.wait_for_everyone()  # mark: together


def fail() -> None:
    raise ValueError("the log is closed")


def leave() -> None:
    if HOW == "caught":
        try:
            raise SystemExit(3)
        except SystemExit:
            return
    if HOW == "os._exit":
        os._exit(3)
    if HOW == "atexit":
        atexit.register(fail)
        sys.exit(0)
    raise SystemExit({"code": 3, "text": "no data", "zero": 0, "backward": 3}[HOW])


def main() -> None:
    last = accelerator.process_index == 1
    if last:
        sys.stdout.write(f"fault at {time.time():.3f}\n")
        sys.stdout.flush()
        leave()
    try:
        if HOW == "backward":
            accelerator.backward(model(torch.ones(1, 1)).sum())
        accelerator.wait_for_everyone()
    finally:
        print(f"seen at {time.time():.3f}")


if HOW == "all":
    raise SystemExit(0)  # each rank, in good order
main()  # mark: main
