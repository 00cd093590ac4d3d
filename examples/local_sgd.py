"""Average weights every few steps instead of gradients at every step.

lockstep launch --cpu --num_processes 2 examples/local_sgd.py
lockstep launch --cpu --num_processes 2 examples/local_sgd.py --local_sgd_steps 1   # as often as usual
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, LocalSGD
from lockstep.utils import set_seed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_sgd_steps", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator()
    inputs = torch.randn(1024, 8)
    targets = inputs.sum(dim=1, keepdim=True).sin()
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(arguments.epochs):
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=arguments.local_sgd_steps) as local_sgd:
            for batch, wanted in loader:
                loss = nn.functional.mse_loss(model(batch), wanted)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
        accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
