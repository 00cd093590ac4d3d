"""Train a small classifier of handwritten digits, on one process or on many.

    python examples/digits.py
    lockstep launch --cpu --num_processes 2 examples/digits.py

The lines marked with a number are what Lockstep changes in a plain PyTorch script.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, set_seed, tqdm  # 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10, help="times to go through the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="images a step and process")
    parser.add_argument("--lr", type=float, default=8e-3, help="learning rate at the start")
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], default="no")
    return parser.parse_args()


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8 x 8 that come with scikit-learn, a fifth of them kept for the test."""
    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        torch.tensor(images, dtype=torch.float32) / 16,
        torch.tensor(labels),
        test_size=0.2,
        random_state=0,
        stratify=labels,
    )
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader[Any]) -> tuple[float, int]:
    """The share of images recognised, and of how many: each process looks at its part, each learns all answers."""
    model.eval()
    correct = seen = 0
    for images, labels in loader:
        guesses = model(images).argmax(dim=1)
        # An image that two processes looked at, so that both had the same number of them, counts once.
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))
        correct += int((guesses == labels).sum())
        seen += len(labels)
    model.train()
    return correct / seen, seen


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(mixed_precision=args.mixed_precision)  # 2
    set_seed(0)

    train_set, test_set = load_images()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=64)
    model = make_model()  # no .to(device), here and in the loop
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(train_loader))
    loss_function = nn.CrossEntropyLoss()

    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(  # 3
        model, optimizer, train_loader, test_loader, scheduler
    )

    accelerator.print(f"Training on {accelerator.num_processes} process(es), device {accelerator.device}")
    accuracy, seen = 0.0, 0
    with tqdm(total=args.epochs * len(train_loader), unit="step") as bar:
        for epoch in range(args.epochs):
            bar.set_description(f"epoch {epoch + 1}/{args.epochs}")
            for images, labels in train_loader:
                optimizer.zero_grad()
                loss = loss_function(model(images), labels)
                accelerator.backward(loss)  # 4: was loss.backward()
                optimizer.step()
                scheduler.step()
                bar.update()
            accuracy, seen = evaluate(accelerator, model, test_loader)  # 5: see gather_for_metrics there
            bar.set_postfix(loss=f"{loss.item():.3f}", accuracy=f"{accuracy:.1%}")

    # Every process has worked out the accuracy by itself: did all of them get the same?
    everyone = accelerator.gather(torch.tensor([accuracy], device=accelerator.device)).tolist()
    if len(set(everyone)) > 1:
        raise SystemExit(f"The ranks disagree about the accuracy: {everyone}")
    accelerator.print(f"Test accuracy {accuracy:.2%} on {seen} images, the same on each of {len(everyone)} process(es)")


if __name__ == "__main__":
    main()
