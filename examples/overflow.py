"""A model that overflows fp16 after a while, and the detector that says where.

    python examples/overflow.py --debug underflow_overflow
    lockstep launch --cpu --num_processes 2 examples/overflow.py --debug underflow_overflow
    python examples/overflow.py --nan-policy skip
    python examples/overflow.py --fp32 block.scale

One block multiplies its values a little more with each step, as activations grow in a training that goes wrong. The
last command is what the detector's report proposes.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, set_seed
from lockstep.debug_utils import run_in_fp32


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model whose activations grow until they overflow.")
    parser.add_argument("--debug", choices=["underflow_overflow", "collectives"], help="passed on to the Accelerator")
    parser.add_argument("--nan-policy", choices=["warn", "skip", "stop", "off"])
    parser.add_argument("--fp32", metavar="MODULE", help="a module to compute in fp32")
    parser.add_argument("--steps", type=int, default=16)
    return parser.parse_args()


class Growing(nn.Module):
    """Doubles what it gives with every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.factor *= 2.0
        return x * self.factor * 4.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.scale, self.norm = nn.Linear(16, 16), Growing(), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.scale(self.dense(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(8, 16), Block(), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(torch.relu(self.embed(x))))


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(mixed_precision="fp16", debug=args.debug, nan_policy=args.nan_policy)
    set_seed(0)
    model = Model()
    if args.fp32:
        run_in_fp32(model, args.fp32)
    data = TensorDataset(torch.randn(args.steps * 8 * accelerator.num_processes, 8))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-2), DataLoader(data, batch_size=8)
    )
    dropped = 0
    for (x,) in loader:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        dropped += accelerator.optimizer_step_was_skipped
    accelerator.print(f"{args.steps} steps, {dropped} updates dropped, last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
