"""Several iterations of prepared loaders at once, on one process: each has its own place, end and rounds."""

from __future__ import annotations

import gc
import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lockstep import Accelerator, DataLoaderConfiguration

pytestmark = pytest.mark.usefixtures("alone")


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def make(kind: str = "map", count: int = 10, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    data: Any = torch.arange(count) if kind == "map" else Stream(count)
    return DataLoader(data, batch_size=batch_size, **options)


def batches(count: int = 10, batch_size: int = 2) -> list[list[int]]:
    return [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)]


class Training:
    """A model that counts its updates."""

    def __init__(self, steps: int, *loaders: DataLoader[Any], **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
        model = nn.Linear(1, 1)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        self.loaders = [self.accelerator.prepare(loader) for loader in loaders]
        self.updates: list[int] = []
        self.count = 0

    def step(self, batch: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch.float().reshape(-1, 1)).mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.count += 1
        if self.accelerator.sync_gradients:
            self.updates.append(self.count)


WORKERS = [
    {"num_workers": 0},
    {"num_workers": 1},
    pytest.param({"num_workers": 2, "persistent_workers": True}, marks=pytest.mark.soak),
]


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_two_iterations_side_by_side(kind: str, options: dict[str, Any]) -> None:
    loader = Accelerator(cpu=True).prepare(make(kind, **options))
    due = (
        batches()
        if options["num_workers"] < 2 or kind == "map"
        else [each for pair in zip(batches(), batches(), strict=True) for each in pair]
    )
    for _ in range(2):
        seen = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader)]  # noqa: B905
        assert seen == [(batch, batch) for batch in due]
    assert [batch.tolist() for batch in loader] == due


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_one_iteration_does_not_move_the_other(kind: str) -> None:
    loader = Accelerator(cpu=True).prepare(make(kind))
    first, second = iter(loader), iter(loader)
    assert [next(first).tolist(), next(first).tolist(), next(second).tolist()] == [[0, 1], [2, 3], [0, 1]]
    assert loader.sample_ids == [0, 1]
    assert next(first).tolist() == [4, 5]
    assert loader.sample_ids == [4, 5]  # the older one has drawn again
    assert [batch.tolist() for batch in second] == batches()[1:]
    assert loader.sample_ids == [4, 5]
    assert [batch.tolist() for batch in first] == batches()[3:]


def test_each_iteration_knows_its_own_end() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make(count=6))
    state = accelerator.gradient_state
    first, second = iter(loader), iter(loader)
    for _ in range(3):
        next(first)
    assert loader.end_of_dataloader
    next(second)
    assert not loader.end_of_dataloader
    assert not state.end_of_dataloader
    assert len(state.dataloader_references) == 3
    del second
    assert loader.end_of_dataloader
    assert state.end_of_dataloader
    assert list(first) == []
    assert not state.in_dataloader


@pytest.mark.parametrize("interruption", ["peek", "kept", "nested", "other", "other kept", "evaluation"])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_training_windows_end_with_the_loader_that_is_trained_on(interruption: str, at: int) -> None:
    run = Training(3, make(), make(count=2), make(count=4))
    loader, one_batch, held_out = run.loaders
    kept = []
    for _ in range(2):
        run.updates, run.count = [], 0
        for step, batch in enumerate(loader):
            if step == at:
                if interruption == "peek":
                    next(iter(loader))
                elif interruption == "kept":
                    kept.append(iter(loader))
                    next(kept[-1])
                elif interruption == "nested":
                    assert len(list(loader)) == 5
                elif interruption == "other":
                    next(iter(one_batch))
                elif interruption == "other kept":
                    kept.append(iter(one_batch))
                    next(kept[-1])
                else:
                    for _batch in held_out:
                        pass
            run.step(batch)
        assert run.updates == [3, 5]


def test_a_second_loader_that_is_drawn_from_at_each_step() -> None:
    """Its own end is not the epoch's."""
    run = Training(2, make(), make(count=6))
    loader, other = run.loaders
    more = iter(other)
    for _ in range(2):
        run.updates, run.count = [], 0
        for batch in loader:
            extra = next(more, None)
            if extra is None:
                more = iter(other)
                extra = next(more)
            run.step(batch + extra)
        assert run.updates == [2, 4, 5]


def test_a_batch_that_was_looked_at_before_training() -> None:
    run = Training(2, make(), make(count=2))
    loader, held_out = run.loaders
    kept = [iter(loader), iter(held_out)]
    for each in kept:
        next(each)
    for batch in loader:
        run.step(batch)
    assert run.updates == [2, 4, 5]


def test_an_old_iterator_that_is_collected_late() -> None:
    run = Training(3, make())
    [loader] = run.loaders
    old: Any = iter(loader)
    next(old)
    for step, batch in enumerate(loader):
        run.step(batch)
        if step == 3:
            old = None
            gc.collect()
            assert loader.sample_ids == batch.tolist()
            assert loader.remaining == 2
    assert run.updates == [3, 5]


def test_a_cycle_and_starting_again() -> None:
    run = Training(2, make(count=6))
    [loader] = run.loaders
    for batch in itertools.islice(itertools.cycle(loader), 7):
        run.step(batch)
    assert run.updates[:2] == [2, 3]
    for _ in range(2):
        for _batch in loader:
            break
    assert [batch.tolist() for batch in loader] == batches(6)
    assert loader.iteration == 2  # the cycle's, and the last one: a loop that is left does not count


def test_an_error_in_the_loop() -> None:
    run = Training(2, make())
    [loader] = run.loaders
    kept = None
    try:
        for _batch in loader:
            raise KeyError
    except KeyError as error:
        kept = error  # and with it the frame, and the iterator
    for batch in loader:
        run.step(batch)
    assert run.updates == [2, 4, 5]
    assert kept is not None


def test_a_thread_that_draws_ahead() -> None:
    run = Training(1, make(), make(count=4))
    loader, held_out = run.loaders
    ready: queue.Queue[Any] = queue.Queue(maxsize=2)

    def fill() -> None:
        for batch in loader:
            ready.put(batch)
        ready.put(None)

    thread = threading.Thread(target=fill)
    thread.start()
    seen = []
    while (batch := ready.get()) is not None:
        seen.append(batch.tolist())
        run.step(batch)
        assert [other.tolist() for other in held_out] == batches(4)
    thread.join()
    assert seen == batches()
    assert run.updates == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_left_has_the_same_order_again(workers: int) -> None:
    """As in Accelerate: epochs that came to their end are counted, and the order follows from their number."""
    options = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    loader = accelerator.prepare(make(shuffle=True, num_workers=workers))
    first = next(iter(loader)).tolist()
    assert next(iter(loader)).tolist() == first
    whole = [batch.tolist() for batch in loader]
    assert whole[0] == first
    assert loader.iteration == 1
    assert next(iter(loader)).tolist() != first


# --- where the loader stands --------------------------------------------------------------------------------------


def resumed(state: dict[str, Any], **options: Any) -> list[list[int]]:
    loader = Accelerator(cpu=True).prepare(make(**options))
    loader.load_state_dict(state)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_the_state_is_that_of_the_iteration_that_is_trained_on(kind: str) -> None:
    run = Training(1, make(kind))
    [loader] = run.loaders
    for step, batch in enumerate(loader):
        run.step(batch)
        kept = iter(loader)
        for _ in range(step):
            next(kept)
        assert resumed(loader.state_dict(), kind=kind) == batches()[step + 1 :] or step == 4


@pytest.mark.parametrize("keep", [False, True])
def test_a_batch_that_is_looked_at_between_epochs_is_not_lost(keep: bool) -> None:
    run = Training(1, make())
    [loader] = run.loaders
    for batch in loader:
        run.step(batch)
    peeking = iter(loader)
    next(peeking)
    if not keep:
        del peeking
    assert resumed(loader.state_dict()) == batches()


def test_a_loop_that_was_left_is_resumed_whatever_was_looked_at_since() -> None:
    run = Training(1, make())
    [loader] = run.loaders
    for step, batch in enumerate(loader):
        run.step(batch)
        if step == 1:
            break
    next(iter(loader))
    assert resumed(loader.state_dict()) == batches()[2:]


def test_a_loader_that_is_only_evaluated_on_begins_at_its_start() -> None:
    run = Training(1, make(), make(count=6))
    loader, held_out = run.loaders
    next(iter(held_out))
    for batch in loader:
        run.step(batch)
        break
    next(iter(held_out))
    assert resumed(held_out.state_dict(), count=6) == batches(6)
    assert resumed(loader.state_dict()) == batches()[1:]


def test_a_loop_without_training_is_resumed_where_it_was_left() -> None:
    loader = Accelerator(cpu=True).prepare(make())
    for _ in itertools.islice(loader, 2):
        pass
    assert resumed(loader.state_dict()) == batches()[2:]


# --- the remainder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "due"),
    [("map", {}, 1), ("map", {"drop_last": True}, -1), ("stream", {}, -1)],
)
def test_the_remainder_is_known_from_the_start(kind: str, options: dict[str, Any], due: int) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make(kind, 9, **options))
    assert [accelerator.gradient_state.remainder for _ in loader][:-1] == [due] * (len(list(loader)) - 1)
    assert accelerator.gradient_state.remainder == -1


def test_an_iteration_that_another_thread_ends_can_still_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first optimizer step does, for the line on the run, while a prefetch thread comes to the loader's end."""
    training = Training(1, make())
    (loader,) = training.loaders
    draws = iter(loader)
    batch = next(draws)
    asked = training.accelerator._state.current_batch.training
    assert asked is not None
    list(draws)
    assert asked.loader is loader
    monkeypatch.setattr(type(training.accelerator._state.current_batch), "training", asked)
    training.step(batch)
    assert training.updates == [1]


def test_many_threads_may_draw_at_once() -> None:
    training = Training(1, *(make(count=60) for _ in range(6)))
    found: list[list[int]] = []

    def draw(loader: Any) -> None:
        for _ in range(5):
            found.append([int(item) for batch in loader for item in batch])

    threads = [threading.Thread(target=draw, args=(loader,)) for loader in training.loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(range(60))] * 30
    assert training.accelerator._state.current_batch.live == []


def test_an_iteration_that_is_collected_with_its_loader_ends_quietly(alone: None) -> None:
    """Python reports what a generator raises while it is collected, and pytest fails on that report."""
    for _ in range(3):
        training = Training(1, make())
        iteration = iter(training.loaders[0])
        next(iteration)
        knot: list[Any] = [iteration, training.loaders[0]]  # a cycle: what is weak in it is dead when it is collected
        knot.append(knot)
        training.accelerator.free_memory()
        del training, iteration, knot
        gc.collect()
