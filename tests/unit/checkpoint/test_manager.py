"""The checkpoint manager on a training made by hand: no accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep import ConfigError, ProjectConfiguration
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.training.state import TrainingState
from tests.unit.training.states import make_state, train


def trained(updates: int, seed: int) -> TrainingState:
    torch.manual_seed(seed)
    state = make_state(nn.Linear(2, 1))
    for _ in range(updates):
        train(state, torch.ones(4, 2))
    return state


def test_a_state_comes_back(tmp_path: Path) -> None:
    saved, other = trained(3, seed=1), trained(1, seed=2)
    folder = CheckpointManager(saved).save(tmp_path / "state", safe=True, blocking=True, durable=True)
    assert CheckpointManager(other).load(folder, trusted=False, strict=True) == str(tmp_path / "state")
    assert other.updates == 3
    for mine, theirs in zip(other.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    # The momentum too: both go on alike.
    assert torch.equal(train(other, torch.ones(4, 2)), train(saved, torch.ones(4, 2)))
    assert torch.equal(train(other, torch.ones(4, 2)), train(saved, torch.ones(4, 2)))


def test_folders_are_numbered_in_the_project(tmp_path: Path) -> None:
    state = trained(1, seed=1)
    state.project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    manager = CheckpointManager(state)
    assert manager.load(None, trusted=False, strict=True) is None
    places = [manager.save(None, safe=True, blocking=blocking, durable=False) for blocking in (True, False)]
    manager.wait()
    assert [Path(place).name for place in places] == ["checkpoint_0", "checkpoint_1"]
    assert manager.load(None, trusted=False, strict=True) == places[1]
    assert state.project.iteration == 2


def test_hooks_and_registered_objects_take_part(tmp_path: Path) -> None:
    state, custom = trained(1, seed=1), torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter()], lr=1.0), 1)
    manager = CheckpointManager(state)
    manager.register((custom,))
    calls: list[str] = []
    manager.before_save(lambda models, weights, folder: calls.append(f"saving {len(models)} models"))
    handle = manager.before_load(lambda models, folder: calls.append(f"loading {len(models)} models"))
    custom.last_epoch = 7
    folder = manager.save(tmp_path / "state", safe=True, blocking=True, durable=False)
    custom.last_epoch = 0
    manager.load(folder, trusted=False, strict=True)
    assert custom.last_epoch == 7
    assert calls == ["saving 1 models", "loading 1 models"]
    handle.remove()
    manager.load(folder, trusted=False, strict=True)
    assert len(calls) == 2


def test_what_cannot_be_saved_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"was given a int \(argument 2\)"):
        CheckpointManager(make_state()).register((nn.Linear(1, 1), 3))
