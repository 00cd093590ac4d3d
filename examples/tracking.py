"""Log a training to one or more experiment trackers.

    lockstep launch --cpu --num_processes 2 examples/tracking.py   # a text file: nothing to install
    lockstep launch --cpu --num_processes 2 examples/tracking.py --log_with tensorboard jsonl
    WANDB_MODE=offline python examples/tracking.py --log_with wandb

TensorBoard shows it with `tensorboard --logdir tracking_example`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from lockstep.utils import set_seed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log_with", nargs="+", default=["jsonl"])
    parser.add_argument("--project_dir", default="tracking_example")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(log_with=arguments.log_with, project_dir=arguments.project_dir)
    accelerator.init_trackers("regression", config={"lr": arguments.lr, "model": {"inputs": 4}})

    inputs = torch.randn(256, 4)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    for epoch in range(arguments.epochs):
        for batch, wanted in loader:
            loss = nn.functional.mse_loss(model(batch), wanted)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            # Called on all ranks: reduce needs them all; log acts on the main one.
            accelerator.log(
                {"train/loss": accelerator.reduce(loss.detach(), "mean"), "train/grad_norm": norm}, step=step
            )
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
