"""DDP's inside, on one rank; tests/distributed/test_join_ranks.py joins real ones."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.testing import run_ranks
from lockstep.torch_internals import ddp


def wrapped(**options: Any) -> DistributedDataParallel:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), **options)


def step(model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    model(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).square().sum().backward()
    return next(model.parameters()).grad.clone()  # type: ignore[union-attr]


def hooks_and_flags() -> list[Any]:
    model = wrapped()
    before = ddp.has_hook(model)
    model.register_comm_hook(None, lambda _, bucket: done(bucket))
    with model.join():
        joined = ddp.is_in_join(model)
        step(model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model.module, ["0.bias"])
    ddp.share_buffers(model)
    return [before, ddp.has_hook(model), joined, list(ddp.ignored_parameters(model.module))]


def done(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_hooks_joins_and_what_is_ignored_are_seen() -> None:
    assert run_ranks(hooks_and_flags, 1) == [[False, True, True, ["0.bias"]]]


def another_group() -> list[bool]:
    model = wrapped(static_graph=True)
    plain = step(model)
    step(model)
    known = [ddp.knows_static_graph(model)]
    model.register_comm_hook(None, lambda _, bucket: done(bucket))
    old = dist.group.WORLD
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = dist.group.WORLD
    ddp.remake_reducer(model, made)
    known += [ddp.knows_static_graph(model), ddp.has_hook(model), model.process_group is made]
    known.append(torch.allclose(step(model), plain))
    assert old is not made
    another = dist.new_group([0])
    ddp.use_group(model, another)
    return [*known, model.process_group is another]


def test_a_model_is_pointed_at_another_group_and_trains_on() -> None:
    assert run_ranks(another_group, 1) == [[True, False, False, True, True, True]]


def met_around() -> list[str]:
    model, events = wrapped(), []
    original = DistributedDataParallel._pre_forward

    def told(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        events.append("pre")
        return original(self, *inputs, **kwargs)

    DistributedDataParallel._pre_forward = told  # type: ignore[method-assign]
    try:
        ddp.around_pre_forward(model, lambda: events.append("meet"))
        with torch.no_grad():
            model(torch.ones(2, 2))  # is not trained on: is left alone
        step(model)
        step(model)  # once only
        ddp.around_pre_forward(model, lambda: events.append("never"))
        ddp.around_pre_forward(model, None)
        step(model)
    finally:
        DistributedDataParallel._pre_forward = original  # type: ignore[method-assign]
    return events


def test_ranks_meet_around_what_comes_before_one_forward() -> None:
    assert run_ranks(met_around, 1) == [["pre", "meet", "pre", "meet", "pre", "pre"]]


class Own(DistributedDataParallel):
    extra = "mine"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ddp.reduce_as_torchs(self, ("extra",), find_unused_parameters=True)


def copied() -> list[Any]:
    wrapped()
    model = Own(nn.Linear(2, 1))
    model.extra = "mine"
    model.register_comm_hook(None, lambda _, bucket: done(bucket))
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    found = torch.load(kept, weights_only=False)
    return [type(found) is DistributedDataParallel, "extra" in vars(found), found.find_unused_parameters]


def test_a_copy_is_torchs_own() -> None:
    assert run_ranks(copied, 1) == [[True, False, True]]


def joined() -> list[Any]:
    """A rank that is always the last one: what DDP asks in a join goes to our answers, and its own come back."""
    model = wrapped(find_unused_parameters=True)
    asked: list[str] = []
    unused = ddp.used_map(model)

    def agree(is_joined_rank: bool) -> bool | None:
        asked.append(f"agree {is_joined_rank}")
        return None

    answers = ddp.JoinAnswers(
        agree=agree,
        answer_unused=lambda: asked.append("unused"),
        find_common_rank=lambda rank, candidate: rank,
        send=lambda tensors, size, source=0: asked.append("send"),
        sync_final=lambda is_last: asked.append(f"final {is_last}"),
    )
    with ddp.joining(model, answers):
        join = ddp.LeavableJoin([model], lambda: asked.append("count") or 0)  # type: ignore[func-returns-value]
        step(model)
        join.__exit__(None, None, None)
        inside = ddp.is_in_join(model)
    outside = [ddp.is_in_join(model), "_sync_final_model" in vars(model)]
    return [sorted(set(asked)), unused.dtype == torch.int32, inside, *outside]


def test_a_join_asks_us() -> None:
    assert run_ranks(joined, 1) == [[["agree False", "count", "final True", "send"], True, True, False, False]]
