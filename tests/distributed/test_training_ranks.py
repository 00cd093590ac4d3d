"""The training loop on several ranks: when gradients travel, what they are, and how schedules advance."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.data import DataLoader

from lockstep import Accelerator, GradientAccumulationPlugin, GradScalerKwargs
from lockstep.testing import run_ranks
from lockstep.utils import gather_object
from tests.ranks import in_soak


def weight() -> nn.Linear:
    """A model whose gradient for the loss ``model(x).mean()`` is the mean of x."""
    return nn.Linear(1, 1, bias=False)


def ones(value: float = 1.0) -> torch.Tensor:
    return torch.full((1, 1), float(value))


# ---------------------------------------------------------------- accumulation


def gradients_over_a_window(count: int, window: int, options: dict[str, Any]) -> list[tuple[bool, float]]:
    """Rank r's micro-batch i is the number 10 r + i + 1; sync_gradients and the gradient after each backward."""
    plugin = GradientAccumulationPlugin(num_steps=window, **options)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model = weight()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    seen = []
    for place in range(count):
        with accelerator.accumulate(model):
            accelerator.backward(model(ones(10 * accelerator.process_index + place + 1)).mean())
            seen.append((accelerator.sync_gradients, model.module.weight.grad.item()))
            optimizer.step()
            optimizer.zero_grad()
    return seen


def test_gradients_stay_on_their_rank_until_the_window_closes() -> None:
    first, second = run_ranks(gradients_over_a_window, 2, 4, 2, {})
    assert [sync for sync, _ in first] == [sync for sync, _ in second] == [False, True, False, True]
    assert [value for _, value in first] == pytest.approx([0.5, 6.5, 1.5, 8.5])
    assert [value for _, value in second] == pytest.approx([5.5, 6.5, 6.5, 8.5])


def test_gradients_travel_with_each_batch_when_asked() -> None:
    first, second = run_ranks(gradients_over_a_window, 2, 2, 2, {"sync_each_batch": True})
    assert first == second
    assert [value for _, value in first] == pytest.approx([(1 + 11) / 2 / 2, 6.5])


def epoch(count: int, window: int, tail: str) -> list[float]:
    plugin = GradientAccumulationPlugin(num_steps=window, tail_divisor=tail)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model = weight()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        DataLoader(torch.arange(1.0, count + 1).view(-1, 1), batch_size=1),
    )
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                seen.append(model.module.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    return seen


def test_the_tail_of_an_epoch() -> None:
    """Eight samples on two ranks are four micro-batches each; windows of three leave a tail of one."""
    first, second = run_ranks(epoch, 2, 8, 3, "present")
    assert first == second == pytest.approx([3.5, 7.5])
    first, second = run_ranks(epoch, 2, 8, 3, "window")
    assert first == second == pytest.approx([3.5, 7.5 / 3])


def held_back() -> list[float]:
    accelerator = Accelerator()
    model = accelerator.prepare(weight())
    rank = accelerator.process_index
    seen = []
    with accelerator.no_sync(model):
        accelerator.backward(model(ones(rank)).mean())
    seen.append(model.module.weight.grad.item())
    accelerator.backward(model(ones(rank)).mean())
    seen.append(model.module.weight.grad.item())
    return seen


def test_no_sync() -> None:
    assert run_ranks(held_back, 2) == [[0.0, 1.0], [1.0, 1.0]]


def forced() -> tuple[float, float, float]:
    accelerator = Accelerator()
    model = accelerator.prepare(weight())
    rank = accelerator.process_index
    with accelerator.no_sync(model):
        first = model(ones(rank)).mean()
        second = model(ones(2 * rank)).mean()
        accelerator.backward(first)
        local = model.module.weight.grad.item()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    averaged = model.module.weight.grad.item()
    model.zero_grad()
    accelerator.backward(model(ones(rank)).mean())  # and everything is as before
    return local, averaged, model.module.weight.grad.item()


def test_trigger_sync_in_backward() -> None:
    assert run_ranks(forced, 2) == [(0.0, 1.5, 0.5), (1.0, 1.5, 0.5)]


def two_models() -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    models = accelerator.prepare(weight(), weight())
    seen = []
    for _ in range(2):
        with accelerator.accumulate(*models):
            value = ones(accelerator.process_index)
            accelerator.backward(models[0](value).mean())
            accelerator.backward(3 * models[1](value).mean())
            seen += [model.module.weight.grad.item() for model in models]
    return seen


def test_several_models_are_held_back_together() -> None:
    assert run_ranks(two_models, 2) == [[0.0, 0.0, 0.5, 1.5], [0.5, 1.5, 0.5, 1.5]]


def interrupted() -> tuple[bool, list[float]]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(weight())
    try:
        with accelerator.accumulate(model):
            raise KeyError
    except KeyError:
        pass
    sync = model.require_backward_grad_sync
    model.zero_grad()
    with accelerator.accumulate(model):
        accelerator.backward(model(ones(accelerator.process_index)).mean())
    return sync, [model.module.weight.grad.item()]


def test_an_exception_in_the_block_lets_gradients_travel_again() -> None:
    first, second = run_ranks(interrupted, 2)
    assert first == second
    assert first[0] is True


# ---------------------------------------------------------------- weights


def weighted(cases: list[tuple[list[list[int]], str]]) -> list[float]:
    """The largest difference to the full-batch gradient, for tables of counts[micro-batch][rank]."""
    accelerator = Accelerator(
        mixed_precision=cases[0][1], kwargs_handlers=[GradScalerKwargs(init_scale=256.0)], gradient_accumulation_steps=1
    )
    rank, errors = accelerator.process_index, []
    for number, (counts, _) in enumerate(cases):
        torch.manual_seed(number)
        model, reference = nn.Linear(3, 1), nn.Linear(3, 1)
        reference.load_state_dict(model.state_dict())
        batches = [[torch.randn(count, 3) for count in row] for row in counts]
        accelerator.gradient_accumulation_steps = len(counts)
        accelerator.step = 0
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for row in batches:
            mine = row[rank]
            with accelerator.accumulate(model):
                padded = torch.cat([mine, torch.ones(1, 3)])
                mask = torch.tensor([1.0] * len(mine) + [0.0])
                losses = model(padded).square().squeeze(1)
                accelerator.backward((losses * mask).sum() / mask.sum(), num_items=len(mine))
        accelerator.unscale_gradients(optimizer)
        reference(torch.cat([part for row in batches for part in row])).square().mean().backward()
        wanted = [parameter.grad for parameter in reference.parameters()]
        scale = max(1.0, *(gradient.abs().max().item() for gradient in wanted))
        errors.append(
            max(
                (parameter.grad - gradient).abs().max().item() / scale
                for parameter, gradient in zip(model.parameters(), wanted, strict=True)
            )
        )
        accelerator.free_memory()
    return errors


def tables(world_size: int) -> Any:
    row = st.lists(st.integers(0, 6), min_size=world_size, max_size=world_size)
    return st.lists(row, min_size=1, max_size=4).filter(lambda rows: any(map(any, rows)))


@pytest.mark.parametrize("world_size", [1, 2, *in_soak(4)])
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-6), ("fp16", 1e-2)])
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_weights_give_the_full_batch_gradient(
    world_size: int, precision: str, tolerance: float, data: st.DataObject
) -> None:
    drawn = data.draw(st.lists(tables(world_size), min_size=8, max_size=8))
    alone = [[5] + [0] * (world_size - 1), [0] * (world_size - 1) + [1]]
    for errors in run_ranks(weighted, world_size, [(table, precision) for table in (alone, *drawn)]):
        assert max(errors) <= tolerance


# ---------------------------------------------------------------- preparing


def prepared_again() -> tuple[bool, bool, bool, bool, list[bool]]:
    accelerator = Accelerator(mixed_precision="bf16")
    raw = weight()
    optimizer = accelerator.prepare(torch.optim.SGD(raw.parameters(), lr=1.0))
    model = accelerator.prepare(raw)
    same = accelerator.prepare(model) is model
    same_raw = accelerator.prepare(raw) is model
    unwrapped = accelerator.unwrap_model(model) is raw and "forward" in raw.__dict__
    bare = "forward" not in accelerator.unwrap_model(model, keep_fp32_wrapper=False).__dict__
    accelerator.backward(model(ones(accelerator.process_index + 1)).mean())
    optimizer.step()
    watched = [weakref.ref(item) for item in (model, raw, optimizer)]
    accelerator.free_memory()
    del model, raw, optimizer
    gc.collect()
    return same, same_raw, unwrapped, bare, [ref() is None for ref in watched]


def test_preparing_on_two_ranks() -> None:
    for same, same_raw, unwrapped, bare, gone in run_ranks(prepared_again, 2):
        assert same
        assert same_raw
        assert unwrapped
        assert bare
        assert gone == [True, True, True]


def prepared_by_two() -> tuple[bool, list[float]]:
    """Trained through the wrapper of the second accelerator, while the first one keeps its own."""
    first, second = Accelerator(), Accelerator(gradient_accumulation_steps=2)
    raw = weight()
    theirs, optimizer = first.prepare(raw, torch.optim.SGD(raw.parameters(), lr=1.0))
    model, optimizer = second.prepare(theirs, optimizer)
    seen = []
    for _ in range(4):
        with second.accumulate(model):
            second.backward(model(ones(second.process_index + 1)).mean())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(raw.weight.item())
    return model is not theirs and second.unwrap_model(model) is raw, seen


def test_what_another_accelerator_prepared_is_prepared_anew() -> None:
    answers = run_ranks(prepared_by_two, 2)
    assert answers[0] == answers[1]
    for fresh, (first, second, third, fourth) in answers:
        assert fresh
        # The mean of both ranks' gradients, 1 and 2, after each window.
        assert second == third == pytest.approx(first - 1.5)
        assert fourth == pytest.approx(third - 1.5)


def weights_after_training() -> tuple[list[float], list[float], bool]:
    torch.manual_seed(3 + int(Accelerator().process_index))
    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.arange(16.0).view(8, 2) / 16, batch_size=2)
    )
    before = gather_object([model.module.weight.tolist()])
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return before, gather_object([model.module.weight.tolist()]), isinstance(model, DistributedDataParallel)


def test_all_ranks_start_and_stay_the_same() -> None:
    before, after, wrapped = run_ranks(weights_after_training, 2)[0]
    assert wrapped
    assert before[0] == before[1]
    assert after[0] == after[1] != before[0]


# ---------------------------------------------------------------- schedules


def schedule(window: int, arguments: dict[str, Any], kind: str = "count", length: int = 6) -> tuple[list[float], int]:
    accelerator = Accelerator(gradient_accumulation_steps=window, **arguments)
    model = weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler: Any = {
        "count": lambda: LambdaLR(optimizer, lambda step: step),
        "cycle": lambda: OneCycleLR(optimizer, max_lr=1.0, total_steps=length),
        "cosine": lambda: CosineAnnealingLR(optimizer, T_max=length),
    }[kind]()
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(torch.zeros(16, 1), batch_size=2), scheduler
    )
    rates = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return rates, scheduler.last_epoch


@pytest.mark.parametrize(
    ("window", "arguments", "expected"),
    [
        (1, {}, [2, 4, 6, 8]),
        (2, {}, [0, 2, 2, 4]),
        (1, {"split_batches": True}, [1, 2, 3, 4, 5, 6, 7, 8]),
        (1, {"scheduler_unit": "update"}, [1, 2, 3, 4]),
        (2, {"scheduler_unit": "update"}, [0, 1, 1, 2]),
        (2, {"step_with_optimizer": False}, [1, 2, 3, 4]),
    ],
)
def test_how_a_schedule_advances(window: int, arguments: dict[str, Any], expected: list[int]) -> None:
    for rates, _ in run_ranks(schedule, 2, window, arguments):
        assert rates == expected


def test_a_cycle_stays_at_its_end() -> None:
    for rates, steps in run_ranks(schedule, 2, 1, {}, "cycle", 5):
        assert steps == 5
        assert rates[2] == rates[3]


def test_a_schedule_that_ends_early_is_logged_once_on_stderr() -> None:
    """Three epochs of the prepared loader's four batches, when each of them advances the schedule by two."""
    outcomes = run_ranks(schedule, 2, 1, {}, "cosine", 12, on_failure="collect")
    assert [outcome.error_text for outcome in outcomes] == ["", ""]
    lines = [line for outcome in outcomes for line in outcome.output.splitlines() if "learning rate schedule" in line]
    assert len(lines) == 1
    assert "it ends after 1.5 epochs. If it was meant for 3 epochs of 4 batches" in lines[0]


def skipped() -> tuple[bool, int, float]:
    """An overflow on one rank only: the sum is infinite on both."""
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=16.0)])
    model = weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, LambdaLR(optimizer, lambda step: 1.0))
    accelerator.backward(model(ones()).mean() * (1e30 if accelerator.process_index == 1 else 1.0))
    optimizer.step()
    scheduler.step()
    return accelerator.optimizer_step_was_skipped, scheduler.last_epoch, accelerator.scaler.get_scale()


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    assert run_ranks(skipped, 2) == [(True, 0, 8.0)] * 2
