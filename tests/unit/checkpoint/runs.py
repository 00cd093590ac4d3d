"""A small training run whose result depends on everything that a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from lockstep.utils import ProjectConfiguration

SAMPLES = 10


class Average:
    """A registered object: a running mean of the losses, as people write them."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, loss: float) -> None:
        self.count += 1
        self.value += (loss - self.value) / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.count = state["value"], state["count"]


class Run:
    """Shuffled data, dropout, Adam, a schedule, accumulation windows that do not divide the epoch."""

    def __init__(self, project: Path | None = None, limit: int | None = None, **options: Any) -> None:
        if project is not None:
            options["project_config"] = ProjectConfiguration(
                project_dir=str(project), automatic_checkpoint_naming=True, total_limit=limit
            )
        samples = options.pop("samples", SAMPLES)
        self.accelerator = Accelerator(cpu=True, **{"gradient_accumulation_steps": 3, **options})
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
        groups = [
            {"params": model[0].parameters(), "lr": 0.05},
            {"params": [*model[1].parameters(), *model[3].parameters()], "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data = torch.randn(samples, 4, generator=torch.Generator().manual_seed(3))
        loader = DataLoader(TensorDataset(data), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.average = Average()
        self.accelerator.register_for_checkpointing(self.average)
        self.seen: list[int] = []

    def train(self, batches: int | None = None, epochs: int = 2) -> Run:
        """Up to so many batches more, or to the end."""
        done = 0
        for _ in range(self.loader.iteration, epochs):
            for (inputs,) in self.loader:
                self.seen += self.loader.sample_ids
                with self.accelerator.accumulate(self.model):
                    loss = self.model(inputs).pow(2).mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.average.add(float(loss.detach()))
                done += 1
                if done == batches:
                    return self
        return self

    def weights(self) -> Tensor:
        """All that training changes in the model."""
        model = self.accelerator.unwrap_model(self.model)
        return torch.cat([value.detach().double().flatten() for value in model.state_dict().values()])

    def result(self) -> dict[str, Any]:
        """What must be the same after a resume, to the bit."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "weights": torch.cat([value.detach().flatten() for value in self.model.parameters()]).tolist(),
            "buffers": torch.cat([value.double().flatten() for value in self.model.buffers()]).tolist(),
            "moments": torch.cat([torch.as_tensor(value).double().flatten() for value in moments]).tolist(),
            "rates": self.scheduler.get_last_lr(),
            "average": (self.average.value, self.average.count),
            "draw": torch.rand(1).item(),
        }
