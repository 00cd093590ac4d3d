"""What programs are made of: data, models, losses. The ranks and the reference build the same from one seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info

from tests.fuzz.program import Program

Sample = tuple[int, Tensor, Tensor]
Batch = tuple[Tensor, Tensor, Tensor]
"""Numbers of the samples, inputs, targets."""
HELD_OUT = 9
"""Samples for evaluation."""


class Samples(Dataset[Sample]):
    def __init__(self, count: int) -> None:
        self.inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(5))
        self.targets = self.inputs.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Sample:
        return index, self.inputs[index], self.targets[index]

    def take(self, ids: list[int]) -> Batch:
        """A batch by the numbers of its samples."""
        return torch.tensor(ids), self.inputs[ids], self.targets[ids]


class Stream(IterableDataset[Sample]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.samples[index] for index in range(start, len(self.samples), step))


class Buckets(Sampler[list[int]]):
    """A batch sampler of the user's own: batches of two sizes, in turn."""

    def __init__(self, count: int, batch_size: int) -> None:
        self.batches = []
        start = 0
        while start < count:
            size = batch_size + len(self.batches) % 2
            self.batches.append(list(range(start, min(start + size, count))))
            start += size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def training_loader(program: Program) -> DataLoader[Any]:
    """The loader as the user makes it."""
    samples = Samples(program.samples)
    options: dict[str, Any] = {"num_workers": program.workers, "persistent_workers": program.persistent_workers}
    if program.sampler == "batch_sampler":
        buckets = Buckets(program.samples, program.batch_size)
        return DataLoader(samples, batch_sampler=buckets, **options)
    if program.sampler == "weighted":
        weights = [1.0 + index % 3 for index in range(program.samples)]
        generator = torch.Generator().manual_seed(program.seed)
        options["sampler"] = WeightedRandomSampler(weights, program.samples, generator=generator)
    return DataLoader(
        Stream(samples) if program.stream else samples,
        batch_size=program.batch_size,
        shuffle=program.sampler in ("shuffle", "seedable") or None,
        drop_last=program.drop_last,
        **options,
    )


class Network(nn.Module):
    """A small model of each kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(4, 4)
        self.norm = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)) if kind == "conv_bn" else None
        self.second = nn.Linear(4, 4)
        self.head = nn.Linear(8 if kind == "conv_bn" else 4, 1)
        self.other_head = nn.Linear(4, 1) if kind == "unused" else None
        if kind == "tied":
            self.second.weight = self.first.weight
        if kind == "frozen":
            self.first.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.second(torch.tanh(self.first(inputs)))
        if self.norm is not None:
            hidden = self.norm(hidden.unsqueeze(1)).flatten(1)
        head = self.head
        if self.other_head is not None and inputs[0, 0] > 0:
            head = self.other_head
        prediction = head(torch.tanh(hidden))
        if self.kind == "dict":
            return {"prediction": prediction, "hidden": [hidden]}
        if self.kind == "tuple":
            return prediction, hidden
        return prediction


def build_models(program: Program) -> list[nn.Module]:
    """One model, two in a row, or a generator and its critic."""
    torch.manual_seed(program.seed)
    if program.model == "gan":
        generator = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        return [generator, critic]
    if program.model == "pair":
        return [Network("mlp"), nn.Linear(1, 1)]
    return [Network(program.model)]


def build_optimizers(program: Program, models: list[nn.Module]) -> list[Any]:
    """One for all models, or one for each of a GAN's."""
    if program.model == "gan":
        return [_optimizer(program, [model]) for model in models]
    return [_optimizer(program, models)]


def _optimizer(program: Program, models: list[nn.Module]) -> torch.optim.Optimizer:
    parameters = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    if program.optimizer == "adamw":
        # A large eps: with the usual one, rounding in a gradient that is nearly zero becomes a whole step.
        return torch.optim.AdamW(parameters, lr=0.01, eps=1e-2)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def build_schedule(program: Program, optimizer: Any) -> Any:
    if program.schedule == "cosine":
        return CosineAnnealingLR(optimizer, T_max=200)
    return LambdaLR(optimizer, lambda step: 0.99**step) if program.schedule == "lambda" else None


def flat_state(models: list[nn.Module]) -> dict[str, list[float]]:
    """Parameters and buffers, as plain numbers."""
    tensors = {
        "parameters": [tensor for model in models for tensor in model.parameters()],
        "buffers": [tensor for model in models for tensor in model.buffers()],
    }
    return {name: [value for tensor in found for value in tensor.flatten().tolist()] for name, found in tensors.items()}


def prediction(output: Any) -> Tensor:
    """What the loss is of."""
    if isinstance(output, dict):
        return output["prediction"]
    return output[0] if isinstance(output, tuple) else output


def loss_of(models: Sequence[Any], batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean loss of a batch, through one model after the other, and the predictions."""
    _, predicted, targets = batch
    for model in models:
        predicted = prediction(model(predicted))  # mark: forward
    return nn.functional.mse_loss(predicted, targets), predicted


def critic_loss(generator: Any, critic: Any, batch: Batch) -> Tensor:
    real = batch[1]
    scores = critic(torch.cat([real, generator(real.flip(1)).detach()]))
    is_real = (torch.arange(len(scores)) < len(real)).float().unsqueeze(1)
    return nn.functional.binary_cross_entropy_with_logits(scores, is_real)


def generator_loss(generator: Any, critic: Any, batch: Batch) -> Tensor:
    scores = critic(generator(batch[1].flip(1)))
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
