"""Train, be killed, go on: the whole state is saved every few batches and found again at the start.

    lockstep launch --num_processes 2 --max_restarts 3 examples/resume.py
    lockstep launch --num_processes 2 --max_restarts 3 examples/resume.py --die_at 25   # a rank kills itself once

Stop it with Ctrl-C or kill it, and start it again; or send it SIGTERM: it saves first. Both end with the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from lockstep.utils import ProjectConfiguration, set_seed


class Progress:
    """What the script itself wants to remember: any object with these two methods can be registered."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--project_dir", default="resume_example")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save_every", type=int, default=10, help="batches")
    parser.add_argument("--die_at", type=int, help="have the last rank kill itself after so many batches, once")
    arguments = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(
            project_dir=arguments.project_dir, automatic_checkpoint_naming=True, total_limit=2
        ),
        save_on_signal=True,
    )
    set_seed(1, device_specific=True)
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 16, generator=source)
    targets = inputs @ torch.randn(16, 1, generator=source)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    resumed = accelerator.load_state() is not None
    for epoch in range(loader.iteration, arguments.epochs):
        for samples, wanted in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(samples), wanted)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.batches += 1
            if progress.batches % arguments.save_every == 0:
                accelerator.save_state(blocking=False)
            if progress.batches == arguments.die_at and not resumed and accelerator.is_last_process:
                os.kill(os.getpid(), signal.SIGKILL)
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    weights = b"".join(value.numpy().tobytes() for value in accelerator.get_state_dict(model).values())
    accelerator.print(f"{progress.batches} batches, weights {hashlib.sha256(weights).hexdigest()[:16]}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
