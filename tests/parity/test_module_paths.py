"""What is imported from one of Accelerate's modules can be imported from ours of the same path."""

from __future__ import annotations

import importlib
import inspect

import pytest

import lockstep
import lockstep.utils

PATHS = (
    "accelerator",
    "big_modeling",
    "data_loader",
    "hooks",
    "launchers",
    "logging",
    "optimizer",
    "scheduler",
    "state",
    "utils.dataclasses",
    "utils.memory",
    "utils.modeling",
    "utils.offload",
    "utils.operations",
    "utils.random",
)


@pytest.mark.parametrize("path", PATHS)
def test_what_we_have_is_where_accelerate_has_it(path: str) -> None:
    theirs = importlib.import_module(f"accelerate.{path}")
    ours = importlib.import_module(f"lockstep.{path}")
    lives_there = {
        name
        for name, value in vars(theirs).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == theirs.__name__
    }
    known = {*lockstep.__all__, *lockstep.utils.__all__}
    missing = sorted(name for name in lives_there & known if not hasattr(ours, name))
    assert missing == []
    strange = sorted(name for name in getattr(ours, "__all__", ()) if not hasattr(theirs, name))
    assert strange == []
    for name in lives_there & known:
        home = lockstep if name in lockstep.__all__ else lockstep.utils
        assert getattr(ours, name) is getattr(home, name)


def test_prepared_objects_are_instances_of_the_known_names(alone: None) -> None:
    import torch
    from torch.utils.data import DataLoader

    from lockstep.data_loader import DataLoaderShard
    from lockstep.optimizer import AcceleratedOptimizer
    from lockstep.scheduler import AcceleratedScheduler

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    made = lockstep.Accelerator(cpu=True).prepare(optimizer, schedule, DataLoader([1]))
    for item, kind in zip(made, (AcceleratedOptimizer, AcceleratedScheduler, DataLoaderShard), strict=True):
        assert isinstance(item, kind)
