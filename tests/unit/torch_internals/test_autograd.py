"""What the autograd engine tells, and takes."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.torch_internals import autograd


def test_only_a_backward_has_a_number() -> None:
    seen: list[int] = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda _: seen.append(autograd.backward_number()))
    leaf.sum().backward()
    leaf.sum().backward()
    assert autograd.backward_number() == -1
    assert -1 not in seen
    assert len(set(seen)) == 2


def test_a_callback_runs_at_the_end_of_its_backward_in_order() -> None:
    events: list[str] = []
    first, second = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)

    def ask(_: Any) -> None:
        autograd.at_end_of_backward(lambda: events.append("end"))
        autograd.at_end_of_backward(lambda: events.append("behind"))

    def accumulated(_: Any) -> None:
        events.append("gradient")

    second.register_hook(ask)
    for leaf in (first, second):
        leaf.register_post_accumulate_grad_hook(accumulated)
    (first * second).backward()
    assert events == ["gradient", "gradient", "end", "behind"]


def test_a_future_is_completed_by_hand() -> None:
    future = autograd.new_future()
    assert not future.done()
    future.set_result(torch.ones(2))
    assert torch.equal(future.wait(), torch.ones(2))
