"""Generators of several ranks in one state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep import current
from lockstep.comm import rng, tensors
from lockstep.errors import ConfigError, DistributedOperationException
from lockstep.testing import run_ranks


def start(seed: int = 100, debug: bool = False) -> tuple[int, torch.Generator]:
    """Join, with generators that differ between the ranks."""
    rank = current.require(debug=debug).topology.rank
    torch.manual_seed(seed + rank)
    return rank, torch.Generator().manual_seed(2 * seed + rank)


def draws(rng_types: list[str], debug: bool = False) -> tuple[float, float, int]:
    _, generator = start(debug=debug)
    calls: list[Any] = []
    original = tensors.broadcast_leaves

    def counted(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        original(*args, **kwargs)

    tensors.broadcast_leaves = counted
    try:
        rng.synchronize_rng_states(rng_types, generator)
    finally:
        tensors.broadcast_leaves = original
    return torch.rand(()).item(), torch.rand((), generator=generator).item(), len(calls)


def draws_after_one() -> float:
    start()
    rng.synchronize_rng_state("torch")
    return torch.rand(()).item()


def draws_without_joining_first() -> tuple[float, bool]:
    torch.manual_seed(int(torch.initial_seed()) + id(object()))
    assert current.peek() is None
    rng.synchronize_rng_state("torch")
    return torch.rand(()).item(), current.peek() is not None


def draws_with_inner() -> float:
    _, generator = start()
    session = current.require()
    rng.synchronize(session.group, session.topology.device, ["generator"], generator)
    return torch.rand((), generator=generator).item()


def refused() -> tuple[str, float]:
    start()
    try:
        rng.synchronize_rng_states(["torch", "cuda"])
    except ConfigError as error:
        return str(error), torch.rand(()).item()
    return "", 0.0


def seeded() -> tuple[float, float]:
    current.require()
    rng.set_seed(5)
    same = torch.rand(()).item()
    rng.set_seed(5, device_specific=True)
    return same, torch.rand(()).item()


def different_types() -> str:
    rank, generator = start(debug=True)
    try:
        rng.synchronize_rng_states(["torch", "generator"] if rank else ["torch"], generator)
    except DistributedOperationException as error:
        return str(error)
    return ""


def expected() -> tuple[float, float]:
    """What rank 0 draws, by torch alone."""
    generator = torch.Generator().manual_seed(100)
    other = torch.Generator().manual_seed(200)
    return torch.rand((), generator=generator).item(), torch.rand((), generator=other).item()


@pytest.mark.parametrize("debug", [False, True])
def test_all_types_follow_rank_0_in_one_collective(debug: bool) -> None:
    torch_draw, generator_draw = expected()
    assert run_ranks(draws, 2, ["torch", "generator", "torch"], debug) == [(torch_draw, generator_draw, 1)] * 2


def test_only_what_was_named_follows() -> None:
    first, second = run_ranks(draws, 2, ["generator"])
    assert first[1] == second[1] == expected()[1]
    assert first[0] != second[0]


def test_nothing_named_nothing_sent() -> None:
    first, second = run_ranks(draws, 2, [])
    assert first[2] == second[2] == 0
    assert first[:2] != second[:2]


def test_one_type() -> None:
    assert run_ranks(draws_after_one, 2) == [expected()[0]] * 2


def test_ranks_that_have_not_joined_do() -> None:
    first, second = run_ranks(draws_without_joining_first, 2)
    assert first == second
    assert first[1]


def test_with_a_group_handed_in() -> None:
    assert run_ranks(draws_with_inner, 2) == [expected()[1]] * 2


def test_another_devices_type_is_refused_on_all_ranks_and_changes_none() -> None:
    (first, first_draw), (second, second_draw) = run_ranks(refused, 2)
    assert first == second
    assert first.startswith("rng_types has 'cuda', but this process computes on 'cpu'")
    assert first_draw == expected()[0] != second_draw


def test_set_seed_by_rank() -> None:
    first, second = run_ranks(seeded, 2)
    assert first[0] == second[0] == first[1] != second[1]


def test_debug_mode_names_ranks_that_sync_different_types() -> None:
    first, second = run_ranks(different_types, 2)
    assert first == second
    assert "broadcast" in first
