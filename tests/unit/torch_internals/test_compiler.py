"""What torch.compile leaves on a module."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.torch_internals import compiler


def test_the_module_inside() -> None:
    net = nn.Linear(2, 1)
    assert compiler.original_of(torch.compile(net)) is net
    assert compiler.original_of(net) is None
    assert compiler.original_of("a model") is None


def test_compiled_around_in_place_and_not() -> None:
    net = nn.Sequential(nn.Linear(2, 1))
    assert not compiler.is_compiled(net)
    assert compiler.is_compiled(torch.compile(net))  # type: ignore[arg-type]
    net[0].compile(backend="eager")
    assert compiler.is_compiled(net)
    compiler.uncompile(net)
    assert not compiler.is_compiled(net)


def test_untraced_work_runs_in_what_is_compiled() -> None:
    seen: list[bool] = []

    def work(value: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return value + 1

    def step(value: torch.Tensor) -> torch.Tensor:
        return compiler.untraced(work, value * 2) * 3

    assert torch.compile(step, backend="eager")(torch.ones(1)).item() == 9
    assert seen == [False]
