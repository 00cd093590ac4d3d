"""A state that is saved when the batch in hand has not been trained on: that batch comes again."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import Accelerator, DataLoaderConfiguration

pytestmark = pytest.mark.usefixtures("alone")
SAMPLES = 12


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(float(SAMPLES)).reshape(-1, 1))


def batches(loader: Any) -> list[float]:
    """The first sample of each."""
    return [float(batch[0][0] if isinstance(batch, list) else batch[0]) for batch in loader]


class Run:
    def __init__(self, kind: str) -> None:
        stateful = kind == "stateful"
        options = DataLoaderConfiguration(use_stateful_dataloader=stateful)
        self.accelerator = Accelerator(cpu=True, dataloader_config=options)
        data: Any = Stream() if kind in ("stream", "stateful") else TensorDataset(torch.arange(12.0).reshape(-1, 1))
        loader: Any = DataLoader(data, batch_size=2, num_workers=kind == "worker")
        model = nn.Linear(1, 1)
        prepared = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        self.model, self.optimizer, self.loader = prepared

    def train(self, batch: Any) -> None:
        self.accelerator.backward(self.model(batch[0] if isinstance(batch, list) else batch).mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, how: str) -> dict[str, Any]:
        """After three batches of six were trained on."""
        if how == "left at the top":
            for number, batch in enumerate(self.loader):
                if number == 3:
                    break
                self.train(batch)
        elif how == "left by zip":
            for batch, _ in zip(self.loader, range(3), strict=False):
                self.train(batch)
        elif how == "left at the bottom":
            for batch in itertools.islice(self.loader, 3):
                self.train(batch)
        else:
            for number, batch in enumerate(self.loader):
                if number == 3:
                    return dict(self.loader.state_dict())
                self.train(batch)
        return dict(self.loader.state_dict())


@pytest.mark.parametrize("how", ["left at the top", "left by zip", "left at the bottom", "saved at the top"])
@pytest.mark.parametrize("kind", ["indexed", "worker", "stream", "stateful"])
def test_it_comes_again(kind: str, how: str) -> None:
    state = Run(kind).state(how)
    assert state["batches"] == 3
    resumed = Run(kind)
    resumed.loader.load_state_dict(state)
    assert batches(resumed.loader) == [6.0, 8.0, 10.0]
    assert batches(resumed.loader) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_the_last_one_too() -> None:
    run = Run("indexed")
    for number, batch in enumerate(run.loader):
        if number == 5:
            state = run.loader.state_dict()
            break
        run.train(batch)
    resumed = Run("indexed")
    resumed.loader.load_state_dict(state)
    assert batches(resumed.loader) == [10.0]
    assert resumed.loader.iteration == 1


def test_one_that_was_skipped_does_not_come_again() -> None:
    run = Run("indexed")
    for number, batch in enumerate(run.loader):
        if number == 1:
            continue
        run.train(batch)
        if number == 2:
            break
    resumed = Run("indexed")
    resumed.loader.load_state_dict(run.loader.state_dict())
    assert batches(resumed.loader) == [6.0, 8.0, 10.0]


def test_an_evaluation_in_between_changes_nothing() -> None:
    run = Run("indexed")
    other = run.accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2))
    for number, batch in enumerate(run.loader):
        run.train(batch)
        assert len(list(other)) == 2
        if number == 2:
            state = run.loader.state_dict()
            break
    resumed = Run("indexed")
    resumed.loader.load_state_dict(state)
    assert batches(resumed.loader) == [6.0, 8.0, 10.0]
