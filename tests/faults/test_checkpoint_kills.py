"""Killed at any write, fsync, rename or deletion of a save: a complete checkpoint is found, the old or the new one."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from lockstep.checkpoint.disk import Disk
from lockstep.testing.faults import die
from lockstep.topology import current
from lockstep.utils import ProjectConfiguration

FAR = 1 << 30


class Dying(Disk):
    """A disk that counts its calls and kills the process at one of them, before it or half-way through."""

    def __init__(self, fatal: int, *, half: bool, swaps: bool) -> None:
        self.calls = 0
        self._fatal, self._half, self._swaps = fatal, half, swaps

    def _count(self, half: Callable[[], Any] = lambda: None) -> None:
        self.calls += 1
        if self.calls == self._fatal:
            if self._half:
                half()
            die(signal.SIGKILL)

    def write(self, file: int, data: memoryview) -> int:
        self._count(lambda: os.write(file, data[: len(data) // 2]))
        return super().write(file, data)

    def fsync(self, file: int) -> None:
        self._count()
        super().fsync(file)

    def create(self, path: Path, text: str = "") -> None:
        self._count(path.touch)
        super().create(path, text)

    def link(self, path: Path, name: Path) -> None:
        self._count()
        super().link(path, name)

    def make(self, folder: Path) -> None:
        self._count()
        super().make(folder)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        self._count()
        return super().exchange(one, other) if self._swaps else False

    def remove(self, folder: Path) -> None:
        self._count(lambda: [path.unlink() for path in sorted(folder.iterdir())[::2] if path.is_file()])
        super().remove(folder)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)


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


@pytest.mark.usefixtures("alone_here")
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


@pytest.fixture
def alone_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    current.reset()
    yield
    current.reset()
