"""Killed at any write, fsync, rename or deletion of a save: a complete checkpoint is found, the old or the new one."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from lockstep.utils import ProjectConfiguration
from tests.faults.dying import Dying

FAR = 1 << 30


class Trainee:
    """The smallest thing to save; its weights say which state it is."""

    def __init__(self, folder: Path, numbered: bool) -> None:
        project = ProjectConfiguration(
            project_dir=str(folder), automatic_checkpoint_naming=numbered, total_limit=1 if numbered else None
        )
        self.accelerator = Accelerator(cpu=True, project_config=project)
        model = nn.Linear(150, 150, bias=False)  # large enough for writes of its own
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), momentum=0.9))
        self.accelerator.backward(self.model(torch.ones(1, 150)).sum())
        self.optimizer.step()
        self.place = None if numbered else folder / "state"

    def save(self, value: float) -> None:
        with torch.no_grad():
            self.model.weight.fill_(value)
        self.accelerator.save_state(self.place)

    def load(self) -> float:
        """What is found, by whoever starts again."""
        with torch.no_grad():
            self.model.weight.fill_(-1.0)
        self.accelerator.load_state(self.place)
        assert bool((self.model.weight == self.model.weight[0, 0]).all())
        return self.model.weight[0, 0].item()


@contextmanager
def in_child() -> Iterator[bool]:
    """The block runs in a forked process and nowhere else; True there."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"the child ended by itself: {status}"
        yield False
        return
    try:
        yield True
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # only a kill is an end we want


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("half", [False, True], ids=["before it", "half-way"])
@pytest.mark.parametrize("kind", ["replaced", "replaced in two steps", "numbered, one kept"])
def test_a_kill_at_every_call_leaves_a_complete_checkpoint(memory: Path, kind: str, half: bool) -> None:
    numbered = kind.startswith("numbered")
    trainee = Trainee(memory, numbered)
    disk = trainee.accelerator._checkpoints.disk = Dying(FAR, half=half, swaps="two steps" not in kind)
    trainee.save(0.0)
    trainee.save(1.0)
    before = disk.calls
    trainee.save(2.0)
    total = disk.calls - before
    assert total >= 20  # else the seam has lost its calls
    old, published = 2.0, 0
    for fatal in range(1, total + 1):
        new = old + 1
        with in_child() as here:
            if here:
                trainee.accelerator._checkpoints.disk = Dying(fatal, half=half, swaps="two steps" not in kind)
                trainee.save(new)
        found = trainee.load()
        assert found in (old, new), f"at call {fatal} of {total}: {found}"
        published += found == new
        trainee.save(new + 1)
        old = new + 1
        left = {path.name for path in (memory / "checkpoints" if numbered else memory).iterdir()}
        assert len(left) == 1, f"after a kill at call {fatal} of {total} there is more than one checkpoint: {left}"
        assert trainee.load() == old
    assert 0 < published < total  # kills after the commit leave the new one


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder whose fsync costs nothing, where there is one: what matters here is the order of the calls."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)
