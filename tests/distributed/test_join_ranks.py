"""Ranks with different numbers of batches: nobody waits for one that has run out, and all end with the same model."""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lockstep import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    UsageError,
)
from lockstep.testing import run_ranks
from tests.ranks import in_soak

LIMIT = 30.0
RECOVERY_SECONDS = 3.0
Values = list[list[float]]


class Net(nn.Module):
    """A small model, with buffers if asked; its side branch is used in every other batch, where there is one."""

    def __init__(self, norm: bool = False, branch: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
        self.side = nn.Linear(8, 8) if branch else None
        self.last = nn.Linear(8, 1)

    def forward(self, rows: torch.Tensor, turn: int = 0) -> torch.Tensor:
        hidden = self.middle(self.first(rows))
        if self.side is not None and turn % 2:
            hidden = hidden + self.side(hidden)
        return self.last(hidden)


def net(norm: bool = False, branch: bool = False) -> Net:
    torch.manual_seed(7)
    return Net(norm, branch)


def batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(5, 4, generator=generator) for _ in range(count)]


def values(model: nn.Module) -> Values:
    return [tensor.detach().double().flatten().tolist() for tensor in model.state_dict().values()]


def one_accelerator(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])


def train_on(accelerator: Accelerator, model: nn.Module, optimizer: Any, count: int = 3) -> None:
    """Called on: all ranks. Some batches as ever, the same number on all ranks."""
    for batch in batches(50 + accelerator.process_index, count):
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------- the same as torch's own


def both_ways(counts: tuple[int, ...], norm: bool, options: dict[str, Any]) -> tuple[Values, Values, Values, int]:
    """What our model and torch's own DDP hold after one uneven epoch each, and ours after some even batches."""
    branch = options.get("find_unused_parameters", False)
    accelerator = one_accelerator(**options)
    rank = accelerator.process_index
    bare = DistributedDataParallel(net(norm, branch), find_unused_parameters=branch)
    optimizer: Any = torch.optim.SGD(bare.parameters(), lr=0.1)
    with Join([bare]):
        for turn, batch in enumerate(batches(rank, counts[rank])):
            bare(batch, turn).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    plain = net(norm, branch)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    seen = 0
    with accelerator.join_uneven_inputs([model]):
        for turn, batch in enumerate(batches(rank, counts[rank])):
            accelerator.backward(model(batch, turn).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            seen += 1
    ours = values(model.module)
    train_on(accelerator, model, optimizer)
    return ours, values(bare.module), values(model.module), seen


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "buffers"])
@pytest.mark.parametrize(
    "counts", [(2, 5), (0, 3), (3, 3), (1, 4, 2), *in_soak((5, 2), (1, 1), (4, 0, 4), (3, 1, 0, 5))], ids=str
)
def test_the_result_is_that_of_torch(counts: tuple[int, ...], norm: bool, options: dict[str, Any]) -> None:
    results = run_ranks(both_ways, len(counts), counts, norm, options)
    assert [seen for *_, seen in results] == list(counts)
    for ours, theirs, later, _ in results:
        assert ours == results[0][0]
        assert ours == theirs
        # Buffers may differ in the end, as ever: each forward updates them after they were shared.
        assert later[:2] == results[0][2][:2]
        assert later[:2] != ours[:2]


def used_once(bare: bool) -> list[bool]:
    """Whether the side branch has a gradient, after each batch: rank 0 uses it in its only one, rank 1 never."""
    accelerator = one_accelerator(find_unused_parameters=True)
    rank = accelerator.process_index
    if bare:
        model: Any = DistributedDataParallel(net(branch=True), find_unused_parameters=True)
    else:
        model = accelerator.prepare(net(branch=True))
    seen = []
    with Join([model]) if bare else accelerator.join_uneven_inputs([model]):
        for batch in batches(rank, 1 + 3 * rank):
            model(batch, 1 - rank).mean().backward()
            seen.append(model.module.side.weight.grad is not None)
            model.zero_grad()
    return seen


def test_a_parameter_that_nobody_uses_any_more_has_no_gradient() -> None:
    assert run_ranks(used_once, 2, False) == [[True], [True, False, False, False]]


def trained(counts: tuple[int, ...], options: dict[str, Any], before: int) -> Values:
    accelerator = one_accelerator(**options)
    plain = net()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    train_on(accelerator, model, optimizer, before)
    with accelerator.join_uneven_inputs([model]):
        for batch in batches(accelerator.process_index, counts[accelerator.process_index]):
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    train_on(accelerator, model, optimizer)
    return values(model)


@pytest.mark.parametrize("before", [1, *in_soak(0, 2)])
@pytest.mark.parametrize(
    "options",
    [
        {"comm_hook": "fp16"},
        {"comm_hook": "power_sgd"},
        {"comm_hook": "power_sgd", "comm_wrapper": "fp16"},
        {"static_graph": True},
        {"static_graph": True, "find_unused_parameters": True},
        {"bucket_cap_mb": 0.0001},
        {"broadcast_buffers": False},
    ],
    ids=str,
)
def test_options_of_ddp(options: dict[str, Any], before: int) -> None:
    for counts in ((3, 1), (1, 4, 2)):
        results = run_ranks(trained, len(counts), counts, options, before)
        assert all(result == results[0] for result in results)


def static_without_a_batch() -> str:
    accelerator = one_accelerator(static_graph=True)
    model = accelerator.prepare(net())

    def step() -> None:
        with accelerator.join_uneven_inputs([model]):
            for batch in batches(0, 2 * accelerator.process_index):
                accelerator.backward(model(batch).mean())

    return str(accelerator.agree(step).failures[0])


def test_a_static_graph_that_a_rank_has_not_seen_says_so() -> None:
    for text in run_ranks(static_without_a_batch, 2):
        assert "UsageError: Rank 0 has no batch for a model with static_graph=True" in text


# ---------------------------------------------------------------- what ranks that ran out have missed


def with_memory(counts: tuple[int, ...]) -> tuple[Values, list[float], Any]:
    accelerator = one_accelerator()
    plain = net()
    adam = torch.optim.Adam(plain.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerator.prepare(plain, adam, LambdaLR(adam, lambda step: 0.9**step))
    for _ in range(2):
        with accelerator.join_uneven_inputs([model]):
            for batch in batches(accelerator.process_index, counts[accelerator.process_index]):
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        train_on(accelerator, model, optimizer)
    moments = [moment.tolist() for state in adam.state_dict()["state"].values() for moment in state.values()]
    return values(model), scheduler.get_last_lr(), moments


@pytest.mark.parametrize("counts", [(4, 2), (0, 3), (2, 2), (1, 4, 4)], ids=str)
def test_optimizers_and_schedules_go_on_from_the_same_place(counts: tuple[int, ...]) -> None:
    results = run_ranks(with_memory, len(counts), counts)
    assert all(result == results[0] for result in results)
    assert results[0][1] == pytest.approx([0.1 * 0.9 ** (len(counts) * 2 * max(counts))])


# ---------------------------------------------------------------- accumulation


def weight() -> nn.Linear:
    """A model whose gradient for the loss ``model(x).mean()`` is the mean of x."""
    return nn.Linear(1, 1, bias=False)


def windows(numbers: list[list[float]], window: int, prepared: bool, options: dict[str, Any]) -> list[float]:
    """The gradients of this rank's updates; then those of two windows after the block."""
    plugin = GradientAccumulationPlugin(num_steps=window, **options)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=plugin,
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )
    mine: Any = [torch.tensor([[number]]) for number in numbers[accelerator.process_index]]
    if prepared:
        order = [ranks[place] for place in range(len(numbers[0])) for ranks in numbers if place < len(ranks)]
        mine = accelerator.prepare(DataLoader(torch.tensor(order).view(-1, 1), batch_size=1))
    plain = weight()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.0))
    seen = []

    def micro_batch(batch: torch.Tensor) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                seen.append(model.module.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()

    with accelerator.join_uneven_inputs([model]):
        for batch in mine:
            micro_batch(batch)
    model.zero_grad()
    for number in range(2 * window):
        micro_batch(torch.tensor([[float(number)]]))
    return seen


@pytest.mark.parametrize("options", [{}, {"sync_each_batch": True}], ids=["held", "each"])
def test_a_window_closes_on_all_ranks_when_one_runs_out(options: dict[str, Any]) -> None:
    """Rank 1's loader ends in the middle of rank 0's second window; what rank 0 has left is its third."""
    first, second = run_ranks(windows, 2, [[1.0, 3.0, 5.0, 7.0], [2.0, 4.0, 6.0]], 2, True, options)
    assert first == pytest.approx([2.5, 5.5, 3.5, 0.5, 2.5])
    assert second == pytest.approx([2.5, 5.5, 0.5, 2.5])


def test_the_tail_divisor_is_kept() -> None:
    numbers = [[1.0, 3.0, 5.0, 7.0], [2.0, 4.0, 6.0]]
    first, second = run_ranks(windows, 2, numbers, 2, True, {"tail_divisor": "window"})
    assert first == pytest.approx([2.5, 2.75, 1.75, 0.5, 2.5])
    assert second == pytest.approx([2.5, 2.75, 0.5, 2.5])


def test_windows_of_lists_are_in_step_after_the_block() -> None:
    """Nobody knows where a list ends: rank 0's third number is left for the next update, and given up here."""
    first, second = run_ranks(windows, 2, [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0, 8.0]], 2, False, {})
    assert first == pytest.approx([2.5, 0.5, 2.5])
    assert second == pytest.approx([2.5, 3.5, 0.5, 2.5])


def test_three_ranks_accumulate() -> None:
    numbers = [[3.0] * 5, [6.0] * 5, [9.0] * 4]
    for rank, seen in enumerate(run_ranks(windows, 3, numbers, 3, True, {})):
        assert seen == pytest.approx([6.0, 6.0, *([3.0] if rank < 2 else []), 1.0, 4.0])


def held_by_hand() -> list[float]:
    accelerator = one_accelerator()
    model = accelerator.prepare(weight())
    rank = accelerator.process_index
    seen = []
    with accelerator.join_uneven_inputs([model]):
        for place in range(2 + 2 * rank):
            with accelerator.no_sync(model) if place % 2 == 0 else accelerator.autocast():
                accelerator.backward(model(torch.full((1, 1), 1.0 + rank)).mean())
            seen.append(model.module.weight.grad.item())
            if place % 2:
                model.zero_grad()
    return seen


def test_no_sync_in_the_block() -> None:
    assert run_ranks(held_by_hand, 2) == [[1.0, 3.0], [2.0, 3.0, 2.0, 2.0]]


def items() -> str:
    accelerator = one_accelerator()
    model = accelerator.prepare(weight())
    with pytest.raises(UsageError) as caught, accelerator.join_uneven_inputs([model]):
        accelerator.backward(model(torch.ones(1, 1)).mean(), num_items=3)
    model.zero_grad()
    accelerator.backward(model(torch.ones(1, 1)).mean(), num_items=3)
    return f"{caught.value} {model.module.weight.grad.item()}"


def test_weights_are_refused_in_the_block() -> None:
    for text in run_ranks(items, 2):
        assert "needs all ranks" in text
        assert text.endswith(" 1.0")


# ---------------------------------------------------------------- other uses


def evaluated(counts: tuple[int, ...]) -> int:
    accelerator = one_accelerator()
    plain = net(norm=True)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    train_on(accelerator, model, optimizer)
    model.eval()
    rows = 0
    with torch.no_grad(), accelerator.join_uneven_inputs([model]):
        for batch in batches(0, counts[accelerator.process_index]):
            rows += len(model(batch))
    model.train()
    train_on(accelerator, model, optimizer)
    return rows


def test_evaluation() -> None:
    assert run_ranks(evaluated, 3, (2, 0, 3)) == [10, 0, 15]


def two_models() -> list[Values]:
    accelerator = one_accelerator()
    first, second = accelerator.prepare(net(), net(norm=True))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    with accelerator.join_uneven_inputs([first, second]):
        for batch in batches(0, 1 + 2 * accelerator.process_index):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
    return [values(first), values(second)]


def test_several_models_that_take_turns() -> None:
    results = run_ranks(two_models, 2)
    assert results[0] == results[1]


def traces() -> tuple[bool, bool, bool, list[str]]:
    accelerator = one_accelerator()
    model = accelerator.prepare(net(norm=True))
    filters, attributes = list(warnings.filters), copy.copy(model.__dict__)
    with accelerator.join_uneven_inputs([model]):
        inside = model._join_config.enable
        for batch in batches(0, 1 + accelerator.process_index):
            accelerator.backward(model(batch).mean())
    with accelerator.join_uneven_inputs([model], even_batches=True):
        even = model._join_config.enable
    changed = [
        name
        for name, value in model.__dict__.items()
        if isinstance(value, (bool, tuple)) and name in attributes and attributes[name] != value
    ]
    added = set(model.__dict__) - set(attributes)
    # The last is the meeting planned for the first forward after the join.
    known = {"_authoritative_rank", "_divide_by_initial_world_size", "_pre_forward"}
    return inside, even, warnings.filters == filters, sorted(added - known) + changed


def test_nothing_is_left_in_the_model() -> None:
    for inside, even, same_filters, changes in run_ranks(traces, 2):
        assert inside
        assert not even  # the ranks have equally many batches then
        assert same_filters
        assert set(changes) <= {"_lazy_init_ran", "require_forward_param_sync", "_has_rebuilt_buckets"}


def overridden() -> tuple[list[int], bool, bool, bool]:
    accelerator = Accelerator(cpu=True)
    plain = weight()
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.1), DataLoader(torch.arange(5.0).view(-1, 1))
    )
    seen = []
    for even in (False, None, True):
        count = 0
        with accelerator.join_uneven_inputs([model], even_batches=even):
            inside = loader.even_batches
            for batch in loader:
                count += 1
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
        seen.append(count)
    accelerator.even_batches = False
    try:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            within = loader.even_batches
            raise KeyError
    except KeyError:
        pass
    return seen, inside, within, loader.even_batches


def test_even_batches_is_overridden_and_restored() -> None:
    results = run_ranks(overridden, 2)
    assert results == [([3, 3, 3], True, False, True), ([2, 3, 3], True, False, True)]


# ---------------------------------------------------------------- what cannot be joined


def refused() -> list[str]:
    accelerator = one_accelerator()
    plain = net()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    texts = []
    for wrong in (model, [], [model, plain], [optimizer], 3):
        with pytest.raises(UsageError) as caught, accelerator.join_uneven_inputs(wrong):  # type: ignore[arg-type]
            raise AssertionError
        texts.append(str(caught.value))
    outer = accelerator.join_uneven_inputs([model])
    with outer, pytest.raises(UsageError) as caught, accelerator.join_uneven_inputs([model]):
        raise AssertionError
    texts.append(str(caught.value))
    train_on(accelerator, model, optimizer)
    return texts


def test_what_cannot_be_joined_raises_before_anything_is_done() -> None:
    bare, empty, second, optimizer, number, nested = run_ranks(refused, 2)[1]
    assert "DistributedDataParallel, not a list" in bare
    assert "empty list" in empty
    assert "item 1 of its list, a Net." in second
    assert "item 0 of its list, a PreparedOptimizer." in optimizer
    assert "int, not a list" in number
    assert "open already" in nested


def alone() -> bool:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(weight())
    with accelerator.join_uneven_inputs([model], even_batches=False):
        accelerator.backward(model(torch.ones(1, 1)).mean())
    return model.weight.grad.item() == 1.0


def test_one_process_has_nobody_to_join() -> None:
    assert run_ranks(alone, 1) == [True]


# ---------------------------------------------------------------- failures


def broken(count: int) -> tuple[list[str], Values, float]:
    """An exception on all ranks at once, which nobody has to be told of."""
    accelerator = one_accelerator()
    plain = net(norm=True)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    texts = []
    start = time.monotonic()
    for _ in range(2):
        try:
            with accelerator.join_uneven_inputs([model]):
                train_on(accelerator, model, optimizer, count)
                raise KeyError("mine")
        except KeyError as error:
            texts.append(str(error))
        train_on(accelerator, model, optimizer)
    return texts, [parameter.flatten().tolist() for parameter in plain.parameters()], time.monotonic() - start


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_exception_leaves_at_once(count: int) -> None:
    results = run_ranks(broken, 2, count)
    for texts, parameters, seconds in results:
        assert texts == ["'mine'", "'mine'"]
        assert parameters == results[0][1]
        assert seconds < LIMIT / 3


def recovered(options: dict[str, Any], norm: bool) -> tuple[list[list[str]], list[float], Values, Values]:
    """In each round another rank fails at another batch, while the others train or have run out."""
    accelerator = one_accelerator(**options)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    branch = options.get("find_unused_parameters", False)
    plain = net(norm, branch)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    names, seconds = [], []
    for turn in range(2 * ranks):
        culprit, place = turn % ranks, turn // 2

        def step(culprit: int = culprit, place: int = place) -> None:
            with accelerator.join_uneven_inputs([model]):
                for number, batch in enumerate(batches(rank, 9 if rank == culprit else 1 + 2 * rank)):
                    if rank == culprit and number == place:
                        raise KeyError(number)
                    accelerator.backward(model(batch, number).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()

        start = time.monotonic()
        agreement = accelerator.agree(step)
        seconds.append(time.monotonic() - start)
        names.append([f"{failure.rank} {failure.kind}" for failure in agreement.failures])
        with torch.no_grad():  # undoing what a step had done is the caller's business
            fresh = net(norm, branch).state_dict().values()
            for tensor, whole in zip(plain.state_dict().values(), fresh, strict=True):
                tensor.copy_(whole)
        optimizer.zero_grad()
    with accelerator.join_uneven_inputs([model]):
        for number, batch in enumerate(batches(rank, 1 + 2 * rank)):
            accelerator.backward(model(batch, number).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    after = values(model.module)
    train_on(accelerator, model, optimizer)
    return names, seconds, after, [parameter.flatten().tolist() for parameter in plain.parameters()]


@pytest.mark.parametrize(
    ("size", "options", "norm"),
    [
        (2, {}, False),
        (3, {}, True),
        (4, {}, False),
        (2, {"static_graph": True}, False),
        (2, {"comm_hook": "fp16"}, False),
    ],
    ids=str,
)
def test_a_rank_that_fails_alone(size: int, options: dict[str, Any], norm: bool) -> None:
    results = run_ranks(recovered, size, options, norm)
    undisturbed = run_ranks(both_ways, size, tuple(1 + 2 * rank for rank in range(size)), norm, options)
    for names, seconds, after, later in results:
        assert names == [[f"{turn % size} KeyError"] for turn in range(2 * size)]
        assert max(seconds) < RECOVERY_SECONDS
        assert after == results[0][2]
        assert later == results[0][3]
        assert after == undisturbed[0][0]
