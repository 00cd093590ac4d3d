"""Losses weighted by tokens or samples, on one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep import Accelerator, ConfigError, GradScalerKwargs, UsageError, current

pytestmark = pytest.mark.usefixtures("alone")

counts = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


def masked_mean(values: torch.Tensor, count: int) -> torch.Tensor:
    """The mean as scripts write it: over nothing it is 0 / 0."""
    mask = torch.zeros_like(values)
    mask[:count] = 1
    return (values * mask).sum() / mask.sum()


@settings(max_examples=40, deadline=None)
@given(sizes=counts, precision=st.sampled_from(["no", "fp16"]), form=st.sampled_from(["mask", "slice"]))
def test_the_gradient_is_that_of_the_whole_batch(sizes: list[int], precision: str, form: str) -> None:
    current.reset()
    torch.manual_seed(sum(sizes))
    accelerator = Accelerator(
        gradient_accumulation_steps=len(sizes),
        mixed_precision=precision,
        cpu=True,
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],
    )
    model = nn.Linear(4, 1)
    reference = nn.Linear(4, 1)
    reference.load_state_dict(model.state_dict())
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [torch.randn(10, 4) for _ in sizes]
    for batch, size in zip(batches, sizes, strict=True):
        with accelerator.accumulate(model):
            losses = model(batch).square()
            loss = masked_mean(losses, size) if form == "mask" else losses[:size].mean()
            accelerator.backward(loss, num_items=size)
    assert accelerator.sync_gradients
    accelerator.unscale_gradients(optimizer)
    items = torch.cat([batch[:size] for batch, size in zip(batches, sizes, strict=True)])
    reference(items).square().mean().backward()
    tolerance = 1e-6 if precision == "no" else 1e-2
    for mine, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        scale = max(1.0, wanted.grad.abs().max().item())
        assert (mine.grad - wanted.grad).abs().max().item() <= tolerance * scale


def test_a_window_follows_the_one_before_with_its_own_items() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    seen = []
    for value, items in ((1.0, 1), (4.0, 3), (2.0, 100), (5.0, 200)):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((items, 1), value)).mean(), num_items=torch.tensor(items))
            if accelerator.sync_gradients:
                seen.append(model.weight.grad.item())
            optimizer.zero_grad()
    assert seen == pytest.approx([(1 + 12) / 4, (200 + 1000) / 300])


def test_without_accumulate() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    for items in (5, 2):
        model.zero_grad()
        accelerator.backward(model(torch.full((items, 1), 3.0)).mean(), num_items=items)
        assert model.weight.grad.item() == pytest.approx(3.0)


def test_nothing_at_all_gives_a_zero_gradient() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    accelerator.backward(masked_mean(model(torch.ones(2, 1)), 0), num_items=0)
    assert model.weight.grad.item() == 0.0


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), "many", None, [1, 2]])
def test_wrong_numbers(wrong: object) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    loss = model(torch.ones(1)).mean()
    if wrong is None:
        accelerator.backward(loss, num_items=None)  # the same as not giving it
    else:
        with pytest.raises(ConfigError, match="num_items="):
            accelerator.backward(loss, num_items=wrong)


def test_mixing_weighted_and_plain_is_an_error() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1)).mean(), num_items=3)
    with accelerator.accumulate(model), pytest.raises(UsageError, match="in all of them, or in none"):
        accelerator.backward(model(torch.ones(1)).mean())
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1)).mean())
    with accelerator.accumulate(model), pytest.raises(UsageError, match="in all of them, or in none"):
        accelerator.backward(model(torch.ones(1)).mean(), num_items=3)


def test_weights_in_a_window_need_the_block() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(UsageError, match="accumulate"):
        accelerator.backward(model(torch.ones(1)).mean(), num_items=3)
