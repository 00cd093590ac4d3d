"""Gradient accumulation on one process: when an update is due, and what its gradient is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep import Accelerator, ConfigError, GradientAccumulationPlugin, UsageError, current

pytestmark = pytest.mark.usefixtures("alone")


class Numbers(Dataset[Tensor]):
    """Sample i is the number i + 1."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Tensor:
        return torch.tensor([float(place + 1)])


class Stream(IterableDataset[Tensor]):
    """The same numbers, of which nobody knows how many there are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(number + 1)]) for number in range(self.count))


class Boastful(Stream):
    """A stream that reports a wrong length."""

    def __init__(self, count: int, reported: int) -> None:
        super().__init__(count)
        self.reported = reported

    def __len__(self) -> int:
        return self.reported


def weight() -> nn.Linear:
    """A model whose gradient for the loss ``model(x).mean()`` is the mean of x."""
    return nn.Linear(1, 1, bias=False)


def updates_of(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any, epochs: int = 1
) -> tuple[list[float], list[bool]]:
    """Train as the guides do; the gradient of each update, and sync_gradients of each micro-batch."""
    gradients, pattern = [], []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                pattern.append(accelerator.sync_gradients)
                if accelerator.sync_gradients:
                    gradients.append(next(model.parameters()).grad.item())
                optimizer.step()
                optimizer.zero_grad()
    return gradients, pattern


def prepared(window: int, dataset: Any, batch_size: int = 1, **options: Any) -> tuple[Any, Any, Any, Any]:
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=window, **options), cpu=True
    )
    model = weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=batch_size))


def windows(count: int, window: int) -> list[list[float]]:
    """The numbers 1..count in windows, the last with what is left."""
    numbers = [float(number + 1) for number in range(count)]
    return [numbers[start : start + window] for start in range(0, count, window)]


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 12),
    window=st.integers(1, 6),
    kind=st.sampled_from([Numbers, Stream]),
    epochs=st.integers(1, 2),
    tail=st.sampled_from(["present", "window"]),
)
def test_an_update_is_the_mean_of_its_micro_batches(count: int, window: int, kind: Any, epochs: int, tail: str) -> None:
    current.reset()
    gradients, pattern = updates_of(*prepared(window, kind(count), tail_divisor=tail), epochs)
    expected = windows(count, window)
    means = [sum(part) / (len(part) if tail == "present" else window) for part in expected]
    assert gradients == pytest.approx(means * epochs, rel=1e-6)
    closing = [(place + 1) % window == 0 or place == count - 1 for place in range(count)]
    assert pattern == closing * epochs


@pytest.mark.parametrize(("count", "reported"), [(7, 5), (5, 9), (1, 4), (4, 1)])
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_a_loader_that_reports_a_wrong_length_does_not_spoil_the_mean(count: int, reported: int) -> None:
    gradients, _ = updates_of(*prepared(3, Boastful(count, reported)))
    assert gradients == pytest.approx([sum(part) / len(part) for part in windows(count, 3)])


def test_seven_micro_batches_in_windows_of_three() -> None:
    """The issue's own numbers: the last update averages over one, where Accelerate divides it by three."""
    present, _ = updates_of(*prepared(3, Numbers(7)))
    assert present == pytest.approx([2.0, 5.0, 7.0])
    current.reset()
    accelerates, _ = updates_of(*prepared(3, Numbers(7), tail_divisor="window"))
    assert accelerates == pytest.approx([2.0, 5.0, 7.0 / 3])


def test_a_window_of_one_is_plain_training() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    mine, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(mine.state_dict())
    data = torch.randn(6, 3)
    model, optimizer, loader = accelerator.prepare(
        mine, torch.optim.SGD(mine.parameters(), lr=0.1), DataLoader(data, batch_size=2)
    )
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch, same in zip(loader, data.split(2), strict=True):
        with accelerator.accumulate(model):
            assert accelerator.sync_gradients
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        plain(same).square().mean().backward()
        other.step()
        other.zero_grad()
    for left, right in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right)


def test_without_the_loader_the_window_crosses_epochs() -> None:
    accelerator, model, optimizer, loader = prepared(4, Numbers(3), sync_with_dataloader=False)
    gradients, pattern = updates_of(accelerator, model, optimizer, loader, epochs=4)
    assert pattern == [False, False, False, True] * 3
    stream = [1.0, 2.0, 3.0] * 4
    assert gradients == pytest.approx([sum(stream[place : place + 4]) / 4 for place in (0, 4, 8)])


def test_several_models_in_one_window() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    first, second = weight(), weight()
    one, two, loader = accelerator.prepare(first, second, DataLoader(Numbers(4)))
    seen = []
    for batch in loader:
        with accelerator.accumulate(one, two):
            accelerator.backward(one(batch).mean() + 10 * two(batch).mean())
            if accelerator.sync_gradients:
                seen += [first.weight.grad.item(), second.weight.grad.item()]
                first.zero_grad()
                second.zero_grad()
    assert seen == pytest.approx([2.0, 20.0, 4.0, 40.0])


@pytest.mark.parametrize("kind", [Numbers, Stream])
@pytest.mark.parametrize("together", [True, False])
def test_two_backwards_in_one_micro_batch(kind: Any, together: bool) -> None:
    """As a GAN does: two losses, and the second one may come after the first model's step."""
    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    models = weight(), weight()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    *both, loader = accelerator.prepare(*models, DataLoader(kind(5)))
    steps = accelerator.prepare(*optimizers)
    seen: list[list[float]] = [[], []]
    for batch in loader:
        with accelerator.accumulate(*both):
            for place, model in enumerate(both):
                accelerator.backward((place + 1) * model(batch).mean())
                if not together and accelerator.sync_gradients:
                    seen[place].append(models[place].weight.grad.item())
                    steps[place].step()
                    steps[place].zero_grad()
            if together and accelerator.sync_gradients:
                for place in (0, 1):
                    seen[place].append(models[place].weight.grad.item())
                    steps[place].zero_grad()
    assert seen[0] == pytest.approx([2.0, 4.5])
    assert seen[1] == pytest.approx([4.0, 9.0])


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_two_backwards_into_one_model(kind: Any) -> None:
    accelerator, model, optimizer, loader = prepared(3, kind(4))
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            accelerator.backward(2 * model(batch).mean())
            if accelerator.sync_gradients:
                seen.append(model.weight.grad.item())
            optimizer.zero_grad()
    assert seen == pytest.approx([6.0, 12.0])


@pytest.mark.parametrize("leave_early", [False, True])
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_an_evaluation_inside_the_loop_does_not_disturb(kind: Any, leave_early: bool) -> None:
    accelerator, model, optimizer, loader = prepared(3, kind(7))
    evaluation = accelerator.prepare(DataLoader(Numbers(2)))
    gradients, pattern = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            pattern.append(accelerator.sync_gradients)
            if accelerator.sync_gradients:
                gradients.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
        for _ in evaluation:
            assert accelerator.gradient_state.active_dataloader is evaluation
            if leave_early:
                break
        assert accelerator.gradient_state.active_dataloader is loader
    assert gradients == pytest.approx([2.0, 5.0, 7.0])
    assert pattern == [False, False, True, False, False, True, True]


def test_leaving_the_loop_early_keeps_the_open_window() -> None:
    accelerator, model, optimizer, loader = prepared(3, Numbers(6))
    gradients, pattern = [], []
    for epoch in range(2):
        for place, batch in enumerate(loader):
            if epoch == 0 and place == 4:
                break
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                pattern.append(accelerator.sync_gradients)
                if accelerator.sync_gradients:
                    gradients.append(model.weight.grad.item())
                optimizer.step()
                optimizer.zero_grad()
    # 1 2 3 | 4 and, in the second epoch, 1 2 | 3 4 5 | 6
    assert pattern == [False, False, True, False, False, True, False, False, True, True]
    assert gradients == pytest.approx([2.0, (4 + 1 + 2) / 3, 4.0, 6.0])
    assert accelerator.gradient_state.active_dataloader is None


def test_an_exception_in_the_block_leaves_a_usable_accelerator() -> None:
    accelerator, model, optimizer, loader = prepared(2, Numbers(4))
    with pytest.raises(ZeroDivisionError), accelerator.accumulate(model):
        raise ZeroDivisionError
    with accelerator.accumulate(model):
        assert accelerator.sync_gradients
    optimizer.zero_grad()
    gradients, _ = updates_of(accelerator, model, optimizer, loader)
    assert gradients == pytest.approx([1.5, 3.5])


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 1)])
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_the_window_can_change_midway(kind: Any, before: int, after: int) -> None:
    accelerator, model, optimizer, loader = prepared(before, kind(9))
    own: list[float] = []
    expected, gradients = [], []
    for place, batch in enumerate(loader):
        if place == 1:
            accelerator.gradient_accumulation_steps = after
            assert accelerator.gradient_accumulation_steps == after
        own.append(float(batch))
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                gradients.append(model.weight.grad.item())
                expected.append(sum(own) / len(own))
                own = []
            optimizer.step()
            optimizer.zero_grad()
    assert len(gradients) >= 3
    assert gradients == pytest.approx(expected)


def test_the_window_is_checked_when_it_changes() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=0 .*at least 1"):
        accelerator.gradient_accumulation_steps = 0
    assert accelerator.gradient_accumulation_steps == 1


def test_a_block_in_a_block_is_an_error() -> None:
    accelerator, model, *_ = prepared(2, Numbers(2))
    with (
        accelerator.accumulate(model),
        pytest.raises(UsageError, match=r"accumulate\(a, b\)"),
        accelerator.accumulate(model),
    ):
        pass


def test_an_optimizer_waits_for_the_window() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = weight()
    start = model.weight.item()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1)).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.item() == start
    assert model.weight.grad.item() == pytest.approx(0.5)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1)).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.item() == pytest.approx(start - 1.0)
    assert model.weight.grad is None


def test_an_unprepared_optimizer_in_a_window_is_an_error() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = accelerator.prepare(weight())
    stranger = torch.optim.Adam(model.parameters())
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1)).mean())
        with pytest.raises(UsageError, match=r"Adam that was not prepared .* window is 2"):
            stranger.step()
    stranger.step()  # outside of the block it is the user's own business


class Wrapping(torch.optim.Optimizer):
    """Steps another optimizer, as sharpness-aware and lookahead optimizers do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()


def test_optimizers_that_are_not_strangers() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = weight()
    start = model.weight.item()
    model, optimizer = accelerator.prepare(model, Wrapping(torch.optim.SGD(model.parameters(), lr=1.0)))
    other = accelerator.prepare(weight())
    when_due = torch.optim.SGD(other.parameters(), lr=1.0)
    for _ in range(4):
        with accelerator.accumulate(model, other):
            perturbation = torch.zeros(1, requires_grad=True)
            inner = torch.optim.SGD([perturbation], lr=1.0)
            torch.autograd.backward(model(perturbation).sum(), inputs=[perturbation])
            inner.step()
            accelerator.backward(model(torch.ones(1)).mean() + other(torch.ones(1)).mean())
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                when_due.step()
                when_due.zero_grad()
    assert model.weight.item() == pytest.approx(start - 2.0)


def test_an_unprepared_optimizer_with_a_window_of_one_steps() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(weight())
    start = model.weight.item()
    stranger = torch.optim.SGD(model.parameters(), lr=1.0)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1)).mean())
        stranger.step()
    assert model.weight.item() == pytest.approx(start - 1.0)
