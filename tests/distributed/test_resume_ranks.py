"""Resuming from a checkpoint of any batch, in each way that scripts do it: all that follows is as without the break."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep import Accelerator, DataLoaderConfiguration
from lockstep.testing import run_ranks
from lockstep.utils import set_seed

EPOCHS = 3
SAMPLES = 13
BATCH = 2


class Samples(Dataset[Tensor]):
    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Tensor:
        return torch.tensor(place)


class Stream(IterableDataset[Tensor]):
    """A stream with another order in each epoch, if it is told which; one that can say where it is.

    A whole number of rounds: what the last one is filled up with comes before the place, and is not read again.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.place = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < SAMPLES - 1:
            self.place += 1
            yield torch.tensor((self.place - 1 + self.epoch) % SAMPLES)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class PlainStream(Stream):
    """One that cannot."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor((place + self.epoch) % SAMPLES) for place in range(SAMPLES))


class Script:
    """A training script, from its first line on."""

    def __init__(self, kind: str, accumulation: int, *, set_epoch: bool = False, split: bool = False) -> None:
        self.set_epoch = set_epoch
        data = DataLoaderConfiguration(
            use_seedable_sampler=kind == "seedable",
            use_stateful_dataloader=kind == "stateful stream",
            split_batches=split,
        )
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=data, scheduler_unit="update"
        )
        set_seed(7)
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.0 if split else 0.2), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, self._loader(kind, 2 * BATCH if split else BATCH)
        )
        self.seen: list[Any] = []

    def _loader(self, kind: str, batch_size: int) -> DataLoader[Any]:
        if kind.endswith("stream"):
            stream = Stream() if kind == "stateful stream" else PlainStream()
            return DataLoader(stream, batch_size=batch_size)
        workers = 1 if kind == "workers" else 0
        # Batches that are cut are whole ones: one process does not fill up the last, and would train on less.
        data = Samples(SAMPLES - 1 if batch_size > BATCH else SAMPLES)
        return DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=workers)

    def train(self, loader: Any, epoch: int, first: int = 0) -> Iterator[int]:
        """The batches that have been trained on, one by one."""
        accelerator = self.accelerator
        for number, batch in enumerate(loader, first + 1):
            with accelerator.accumulate(self.model):
                loss = (self.model(batch.float().reshape(-1, 1) / SAMPLES) - 1).pow(2).mean()
                accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            state = self.loader.state_dict()
            self.seen.append(
                {
                    "epoch": epoch,
                    "batch": batch.tolist(),
                    "rate": self.optimizer.param_groups[0]["lr"],
                    "updated": accelerator.sync_gradients,
                    "loss": loss.item(),
                    "place": [state[name] for name in ("epoch", "places", "batches", "ended")],
                }
            )
            yield number

    def start_epoch(self, epoch: int) -> None:
        if self.set_epoch:
            self.loader.set_epoch(epoch)

    def parameters(self) -> list[float]:
        model = self.accelerator.unwrap_model(self.model)
        return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def save_everywhere(folder: str, script: Script) -> list[tuple[str, int, int]]:
    """Train without a break, with a checkpoint after every batch and after every epoch: their names and steps."""
    saved, step = [], 0
    for epoch in range(EPOCHS):
        script.start_epoch(epoch)
        for number in script.train(script.loader, epoch):
            step += 1
            script.accelerator.save_state(f"{folder}/step_{step}", durable=False)
            saved.append((f"step_{step}", epoch, number))
        script.accelerator.save_state(f"{folder}/epoch_{epoch}", durable=False)
        saved.append((f"epoch_{epoch}", epoch, 0))
    return saved


def resume(script: Script, folder: str, name: str, style: str, per_epoch: int) -> None:
    """Go on as scripts do that were written for Accelerate, or as ours do."""
    accelerator, loader = script.accelerator, script.loader
    accelerator.load_state(f"{folder}/{name}")
    kind, number = name.split("_")
    resume_step = None
    if kind == "epoch":
        starting_epoch = int(number) + 1
    else:
        starting_epoch, resume_step = divmod(int(number), per_epoch)
    if style == "by itself":
        starting_epoch, resume_step = loader.iteration, None
    for epoch in range(starting_epoch, EPOCHS):
        script.start_epoch(epoch)
        if style == "skip" and epoch == starting_epoch and resume_step is not None:
            active = accelerator.skip_first_batches(loader, resume_step)
        else:
            active = loader
        for _ in script.train(active, epoch):
            pass


def check_all(folder: str, kind: str, accumulation: int, style: str, set_epoch: bool, every: int) -> list[str]:
    """Called on: all ranks. What differs after resuming from each checkpoint."""
    whole = Script(kind, accumulation, set_epoch=set_epoch)
    saved = save_everywhere(folder, whole)
    expected, per_epoch = whole.seen, sum(seen["epoch"] == 0 for seen in whole.seen)
    wrong = [] if {seen["epoch"] for seen in expected} == set(range(EPOCHS)) else ["an epoch is missing"]
    step = 0
    for number, (name, _, _) in enumerate(saved):
        step += name.startswith("step")
        if number % every and not name.startswith("epoch") and step % per_epoch:
            continue
        again = Script(kind, accumulation, set_epoch=set_epoch)
        resume(again, folder, name, style, per_epoch)
        for one, other in itertools.zip_longest(again.seen, expected[step:]):
            if one != other:
                wrong.append(f"{name}: {one}, expected {other}")
                break
        if again.parameters() != whole.parameters():
            wrong.append(f"{name}: other parameters")
    return wrong


def in_soak_pairs(*pairs: tuple[int, int]) -> list[Any]:
    return [pytest.param(*pair, marks=pytest.mark.soak) for pair in pairs]


KINDS = ["shuffled", "seedable", "workers", "stream", "stateful stream"]
CASES = [
    (world_size, kind, accumulation, style, set_epoch)
    for world_size in (1, 2)
    for kind in KINDS
    for accumulation in (1, 3)
    for style in ("by itself", "plain", "skip")
    for set_epoch in (False, True)
]
QUICK = [
    (1, "shuffled", 3, "skip", False),
    (1, "stateful stream", 1, "by itself", True),
    (2, "seedable", 3, "skip", True),
    (2, "stream", 3, "skip", False),
    (2, "shuffled", 1, "plain", False),
]


@pytest.mark.parametrize(
    ("world_size", "kind", "accumulation", "style", "set_epoch"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.soak) for case in CASES],
)
def test_a_checkpoint_of_any_batch(
    tmp_path: Path, world_size: int, kind: str, accumulation: int, style: str, set_epoch: bool
) -> None:
    every = 3 if (world_size, kind, accumulation, style, set_epoch) in QUICK else 1
    results = run_ranks(check_all, world_size, str(tmp_path), kind, accumulation, style, set_epoch, every, timeout=120)
    assert results == [[]] * world_size


def first_part(folder: str, kind: str, split: bool, stop: int) -> list[list[int]]:
    script = Script(kind, 2, split=split)
    for number in script.train(script.loader, 0):
        if number == stop:
            script.accelerator.save_state(folder, durable=False)
            break
    return [seen["batch"] for seen in script.seen]


def second_part(folder: str, kind: str, split: bool, style: str, stop: int) -> dict[str, Any]:
    script = Script(kind, 2, split=split)
    if stop:
        script.accelerator.load_state(folder)
    loader = script.loader
    for epoch in range(loader.iteration, EPOCHS):
        active = loader
        if style == "skip" and epoch == 0:
            active = script.accelerator.skip_first_batches(loader, stop)
        for _ in script.train(active, epoch):
            pass
    updates = [sum(seen["updated"] for seen in script.seen if seen["epoch"] == epoch) for epoch in range(EPOCHS)]
    drawn = [[seen["batch"] for seen in script.seen if seen["epoch"] == epoch] for epoch in range(EPOCHS)]
    return {"drawn": drawn, "updates": updates, "parameters": script.parameters()}


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 1), *in_soak_pairs((1, 2), (2, 3), (3, 2))])
def test_on_another_number_of_ranks(tmp_path: Path, before: int, after: int, at_end: bool) -> None:
    """Every sample that was left comes once, and the epochs that follow are whole."""
    stop = -(-SAMPLES // (BATCH * before)) if at_end else 1
    first = run_ranks(first_part, before, str(tmp_path / "state"), "seedable", False, stop)
    second = run_ranks(second_part, after, str(tmp_path / "state"), "seedable", False, "by itself", stop)
    trained = {sample for rank in first for batch in rank for sample in batch}
    assert (len(trained) == SAMPLES) is at_end
    left = set(range(SAMPLES)) - trained
    for epoch in range(EPOCHS):
        expected = left if epoch == 0 else set(range(SAMPLES))
        drawn = [sample for rank in second for batch in rank["drawn"][epoch] for sample in batch]
        assert set(drawn) >= expected, epoch
        assert len(drawn) - len(expected) < BATCH * after, "samples were repeated beyond the last round"
        steps = -(-len(expected) // (BATCH * after))
        assert all(len(rank["drawn"][epoch]) == steps for rank in second)
    assert len({tuple(rank["updates"]) for rank in second}) == 1


@pytest.mark.parametrize("style", ["by itself", "skip"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), *in_soak_pairs((1, 2), (4, 2))])
def test_split_batches_train_the_same_on_another_number_of_ranks(
    tmp_path: Path, before: int, after: int, style: str
) -> None:
    whole = run_ranks(second_part, before, "", "seedable", True, "by itself", 0)
    for stop in (1, 3):
        folder = str(tmp_path / f"state_{stop}")
        run_ranks(first_part, before, folder, "seedable", True, stop)
        second = run_ranks(second_part, after, folder, "seedable", True, style, stop)
        for rank in second:
            assert rank["parameters"] == pytest.approx(whole[0]["parameters"], abs=1e-6)
            assert rank["updates"][1:] == whole[0]["updates"][1:]


def uneven(folder: str, stop: int) -> dict[str, Any]:
    """Save where the last rank has had its last batch of the epoch, and the first has not; or both have."""
    options = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    loader = accelerator.prepare(DataLoader(Samples(5), batch_size=2))
    for number, _ in enumerate(loader, 1):
        if number == min(stop, len(loader)):
            break
    accelerator.save_state(folder, durable=False)
    again = accelerator.prepare(DataLoader(Samples(5), batch_size=2))
    accelerator._state.loaders.remove(loader)
    accelerator.load_state(folder)
    return {"epoch": again.iteration, "rest": [batch.tolist() for batch in again]}


def test_an_epoch_is_over_when_the_first_rank_is_through(tmp_path: Path) -> None:
    assert run_ranks(uneven, 2, str(tmp_path / "one"), 1) == [{"epoch": 0, "rest": [[4]]}, {"epoch": 0, "rest": []}]
    whole = [{"epoch": 1, "rest": [[0, 1], [4]]}, {"epoch": 1, "rest": [[2, 3]]}]
    assert run_ranks(uneven, 2, str(tmp_path / "two"), 2) == whole
