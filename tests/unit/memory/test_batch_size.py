"""The search for a batch size in one process: the contract, what is freed, bad input."""

from __future__ import annotations

import inspect
import random
import weakref
from typing import Any

import accelerate.utils
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep import Accelerator, find_executable_batch_size
from lockstep.errors import ConfigError, OutOfMemory, UsageError

pytestmark = pytest.mark.usefixtures("alone")
FULL = "CUDA out of memory. Tried to allocate 1.00 GiB."


def fits(limit: int, tried: list[int], **options: Any) -> Any:
    @find_executable_batch_size(**options)
    def inner(size: int, *_: Any) -> int:
        tried.append(size)
        if size > limit:
            raise RuntimeError(FULL)
        return size

    return inner


# --- the contract ------------------------------------------------------------------------------------------------


def test_it_halves_until_it_fits_and_starts_afresh_at_each_call() -> None:
    tried: list[int] = []
    inner = fits(20, tried, starting_batch_size=128)
    assert [inner(), inner()] == [16, 16]
    assert tried == [128, 64, 32, 16] * 2


def test_the_default_is_128() -> None:
    tried: list[int] = []
    assert fits(1000, tried)() == 128


def test_without_parentheses_and_with_arguments() -> None:
    @find_executable_batch_size
    def inner(size: int, first: str, *, second: int = 2) -> tuple[int, str, int]:
        """What it does."""
        return size, first, second

    assert inner("a", second=3) == (128, "a", 3)
    assert inner.__doc__ == "What it does."
    assert list(inspect.signature(inner).parameters) == ["first", "second"]


@pytest.mark.parametrize("find", [find_executable_batch_size, accelerate.utils.find_executable_batch_size])
def test_as_in_accelerate(find: Any) -> None:
    tried: list[int] = []
    sizes = iter([60, 20, 5])

    @find(starting_batch_size=100, reduce_batch_size_fn=lambda: next(sizes))
    def inner(batch_size: int, model: str, epochs: int = 1) -> tuple[int, str, int]:
        tried.append(batch_size)
        if batch_size > 10:
            raise RuntimeError(FULL)
        return batch_size, model, epochs

    assert inner("m", epochs=2) == (5, "m", 2)
    assert tried == [100, 60, 20, 5]
    with pytest.raises(TypeError) as told:
        inner(64, "m", 3)
    text = str(told.value).replace("called.Remove", "called. Remove")  # theirs lacks the space
    assert text.startswith("Batch size was passed into `inner` as the first argument when called. Remove this as the")
    assert text.endswith("`inner(model='m', epochs=3)`" if find is find_executable_batch_size else "epochs=3)`")


@pytest.mark.parametrize("find", [find_executable_batch_size, accelerate.utils.find_executable_batch_size])
def test_other_errors_pass_and_zero_ends_it_as_in_accelerate(find: Any) -> None:
    @find(starting_batch_size=4)
    def broken(batch_size: int) -> None:
        raise ValueError("unrelated")

    with pytest.raises(ValueError, match="unrelated"):
        broken()

    @find(starting_batch_size=4)
    def full(batch_size: int) -> None:
        raise RuntimeError(FULL)

    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        full()


def test_reaching_zero_says_what_was_tried() -> None:
    with pytest.raises(
        OutOfMemory, match=r"Tried: 5, 2, 1\. At 1, rank 0 ran out of memory \(tried to allocate 1\.0 GiB\)"
    ):
        fits(0, [], starting_batch_size=5)()


def test_the_batch_size_by_name() -> None:
    @find_executable_batch_size
    def inner(batch_size: int, model: Any) -> None: ...

    with pytest.raises(TypeError, match=r"by name \(batch_size=\) when called.*`inner\(model=1\)`"):
        inner(model=1, batch_size=3)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(1, 3000), limit=st.integers(1, 3000))
def test_halving_finds_the_first_half_that_fits(start: int, limit: int) -> None:
    tried: list[int] = []
    found = fits(limit, tried, starting_batch_size=start)()
    assert found <= limit
    assert tried == [start >> number for number in range(len(tried))]
    assert all(size > limit for size in tried[:-1])


# --- what was asked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -4, 1.5, "8", None, True])
def test_what_is_no_starting_size(size: Any) -> None:
    with pytest.raises(ConfigError, match="starting_batch_size="):
        find_executable_batch_size(starting_batch_size=size)


def test_numpys_whole_numbers_are_fine() -> None:
    assert fits(1000, [], starting_batch_size=np.int64(8))() == 8


def test_a_function_without_a_place_for_the_size() -> None:
    with pytest.raises(TypeError, match=r"Make it the first one: `def nothing\(batch_size, …\)`"):

        @find_executable_batch_size
        def nothing() -> None: ...

    with pytest.raises(TypeError, match="no positional parameter"):
        find_executable_batch_size(lambda *, size: size)
    with pytest.raises(TypeError, match="this is no function"):
        find_executable_batch_size(64)  # type: ignore[arg-type]


@pytest.mark.parametrize(("answer", "told"), [(8, "returned 8 after batch size 8"), (9, "smaller"), ("4", "no whole")])
def test_a_reduce_function_that_does_not_shrink(answer: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        fits(1, [], starting_batch_size=8, reduce_batch_size_fn=lambda: answer)()


def test_other_options_are_checked() -> None:
    for options in ({"search": "bisect"}, {"margin": 1.0}, {"margin": -0.1}, {"reduce_batch_size_fn": 3}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            find_executable_batch_size(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is no Accelerator yet"):
        fits(1, [], keep_effective_batch=True)()


def test_several_processes_need_an_accelerator_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="cannot try together before there is an Accelerator"):
        fits(1, [])()


# --- going up again ----------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(2, 5000), data=st.data())
def test_going_up_finds_what_fits_within_the_margin(start: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, start))
    tried: list[int] = []
    found = fits(limit, tried, starting_batch_size=start, search="binary")()
    assert found <= limit
    assert found == tried[-1]
    assert found >= min(limit, int((limit + 1) * 0.9)) - max(2, limit // 100)
    assert len(tried) <= start.bit_length() + 10


@pytest.mark.parametrize("limit", [1, 44, 45, 46, 62, 63])
def test_without_a_margin_no_size_is_tried_that_is_known_not_to_fit(limit: int) -> None:
    tried: list[int] = []
    assert fits(limit, tried, starting_batch_size=64, search="binary", margin=0)() == limit
    assert len(set(tried[:-1])) == len(tried) - 1


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(2, 500), data=st.data())
def test_with_the_effective_batch_kept_sizes_are_divisors(start: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, start))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    for search in ("halving", "binary"):
        tried: list[int] = []
        found = fits(limit, tried, starting_batch_size=start, search=search, keep_effective_batch=True)()
        assert [start % size for size in tried] == [0] * len(tried)
        assert accelerator.gradient_accumulation_steps == 3 * start // found
    # Each call starts from what was asked for, not from what the one before has made of it.
    fits(start, [], starting_batch_size=start, keep_effective_batch=True)()
    assert accelerator.gradient_accumulation_steps == 3


def test_a_reduce_function_must_keep_the_effective_batch_too() -> None:
    Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="cannot make the same effective batch"):
        fits(1, [], starting_batch_size=8, reduce_batch_size_fn=lambda: 3, keep_effective_batch=True)()


def test_a_trial_is_broken_off_and_the_last_run_is_not() -> None:
    accelerator = Accelerator(cpu=True)
    updates: dict[int, list[int]] = {}

    @find_executable_batch_size(starting_batch_size=64, search="binary")
    def inner(size: int) -> int:
        seen = updates.setdefault(size, [])
        seen.append(0)
        net = nn.Linear(2, 2)
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        for _ in range(5):
            if size > 40:
                raise RuntimeError(FULL)
            try:
                accelerator.backward(model(torch.ones(size, 2)).sum())
            except Exception:
                pytest.fail("the end of a trial is no error of the function's")
            seen[-1] += 1
            optimizer.step()
        return size

    found = inner()
    assert 36 <= found <= 40
    assert updates[found] == [1, 5]
    assert updates[32] == [1]
    assert len(accelerator._state.models) == 1


# --- what is freed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["as in the guide", "without free_memory"])
@pytest.mark.parametrize("place", ["forward", "backward", "after"])
def test_what_the_failed_attempt_held_is_freed(place: str, pattern: str) -> None:
    accelerator = Accelerator(cpu=True)
    outside = accelerator.prepare(nn.Linear(1, 1)) if pattern != "as in the guide" else None
    alive: list[int] = []
    kept: list[weakref.ref[Any]] = []

    def fail(*_: Any) -> None:
        raise RuntimeError(FULL)

    @find_executable_batch_size(starting_batch_size=4)
    def inner(size: int) -> int:
        alive.append(sum(reference() is not None for reference in kept))
        if pattern == "as in the guide":
            accelerator.free_memory()
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(net.parameters())
        _, prepared = accelerator.prepare(net, optimizer)
        data = torch.ones(size, 8)
        hidden = net[0](data)
        kept.extend(map(weakref.ref, (net, optimizer, prepared, data, hidden, net[0].weight)))
        if size > 1 and place == "forward":
            net[1].register_forward_hook(fail)
        loss = net[1](hidden)
        if size > 1 and place == "backward":
            hidden.register_hook(fail)
        accelerator.backward(loss.sum())
        prepared.step()
        if size > 1:
            fail()
        return size

    assert inner() == 1
    assert alive == [0, 0, 0]
    if outside is not None:
        assert accelerator._state.models[0] is outside


def test_each_attempt_draws_the_same_random_numbers() -> None:
    drawn = []

    @find_executable_batch_size(starting_batch_size=4)
    def inner(size: int) -> None:
        drawn.append((torch.rand(1).item(), random.random(), float(np.random.rand())))
        if size > 1:
            raise MemoryError

    inner()
    assert drawn[0] == drawn[1] == drawn[2]
