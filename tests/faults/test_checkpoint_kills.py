"""Killed at any call of a save that reaches the disk: a complete checkpoint is found, the old or the new one."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep import Accelerator, load_checkpoint_in_model
from lockstep.cli import main
from lockstep.errors import CheckpointError
from lockstep.model_files.save import replace_model
from lockstep.storage import write_lock
from lockstep.testing.faults import die
from lockstep.utils import ProjectConfiguration
from tests.faults.dying import Dying
from tests.ranks import in_soak

FAR = 1 << 30
HALF = [pytest.param(False, id="before it"), pytest.param(True, id="half-way", marks=pytest.mark.soak)]


class Trainee:
    """The smallest thing to save; its weights say which state it is."""

    def __init__(self, folder: Path, numbered: bool, blocking: bool = True) -> None:
        project = ProjectConfiguration(
            project_dir=str(folder), automatic_checkpoint_naming=numbered, total_limit=1 if numbered else None
        )
        self.accelerator = Accelerator(cpu=True, project_config=project)
        model = nn.Linear(150, 150, bias=False)  # large enough for writes of its own
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), momentum=0.9))
        self.accelerator.backward(self.model(torch.ones(1, 150)).sum())
        self.optimizer.step()
        self.place = None if numbered else folder / "state"
        self.blocking = blocking

    def save(self, value: float, disk: Dying | None = None) -> None:
        with torch.no_grad():
            self.model.weight.fill_(value)
        self.accelerator._checkpoints.disk = disk or Dying(FAR)
        self.accelerator.save_state(self.place, blocking=self.blocking)
        self.accelerator.wait_for_checkpoint()

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
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize(
    "kind", ["replaced", "numbered, one kept", "in the background", *in_soak("replaced without links")]
)
def test_a_kill_at_every_call_leaves_a_complete_checkpoint(
    memory: Path, kind: str, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_lock, "PATIENCE", 0.5)  # with a lock that says nothing, without links
    numbered, links = kind.startswith("numbered"), "without links" not in kind
    trainee = Trainee(memory, numbered, blocking="background" not in kind)
    trainee.save(0.0)
    trainee.save(1.0)
    trainee.save(2.0, disk := Dying(FAR, links=links))
    total = disk.calls
    assert total >= 20  # else the seam has lost its calls
    old, published = 2.0, 0
    for fatal in range(1, total + 1):
        new = old + 1
        with in_child() as here:
            if here:
                trainee.save(new, Dying(fatal, half=half, links=links))
        found = trainee.load()
        assert found in (old, new), f"at call {fatal} of {total}: {found}"
        published += found == new
        trainee.save(new + 1)
        old = new + 1
        left = [path.name for path in memory.rglob("*") if path.name.startswith(".")]
        assert not left, f"after a kill at call {fatal} of {total} this is left: {left}"
        if numbered:
            assert len(list((memory / "checkpoints").iterdir())) == 1
        assert trainee.load() == old
    assert 0 < published < total  # kills after the commit leave the new one


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["replaced", "numbered, one kept", "in the background"])
def test_a_disk_that_is_full_at_any_call_costs_the_new_checkpoint_at_most(memory: Path, kind: str) -> None:
    trainee = Trainee(memory, kind.startswith("numbered"), blocking="background" not in kind)
    trainee.save(1.0)
    trainee.save(2.0, disk := Dying(FAR))
    old = 2.0
    for fatal in range(1, disk.calls + 1):
        new = old + 1
        problem = None
        try:
            trainee.save(new, Dying(fatal, full=True))
        except CheckpointError as error:
            problem = str(error)
        assert problem is None or "No space left on device" in problem
        saved = problem is None or "is saved and can be loaded" in problem
        assert trainee.load() == (new if saved else old), f"at call {fatal}: {problem}"
        trainee.save(new + 1)
        old = new + 1
        left = [path.name for path in memory.rglob("*") if path.name.startswith(".")]
        assert not left, f"after call {fatal} of {disk.calls} this is left: {left}"
        assert trainee.load() == old


# ---------------------------------------------------------------- files of a model

SIZES = {"divided": 40, "whole": 10**6}
CASES = [(before, after, beside) for before in SIZES for after in SIZES for beside in (False, True)]
QUICK = [("divided", "divided", False), ("divided", "whole", False), ("whole", "divided", True)]


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((10,), value) for name in "abc"}


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.full((10,), -1.0)) for _ in range(3))


def values(state: dict[str, torch.Tensor]) -> set[float]:
    return {number for tensor in state.values() for number in tensor.flatten().tolist()}


def load_ours(path: Path) -> set[float]:
    model = Three()
    load_checkpoint_in_model(model, path, strict=True)
    return values(dict(model.state_dict()))


def load_as_others_do(folder: Path) -> list[set[float]]:
    """What programs find that know nothing of us: for each file with which one may begin."""
    found = []
    if (folder / "model.safetensors").exists():
        found.append(values(load_file(folder / "model.safetensors")))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        places = json.loads(index.read_text())["weight_map"]
        found.append(values({name: load_file(folder / file)[name] for name, file in places.items()}))
    return found


@pytest.mark.parametrize(
    ("before", "after", "with_state"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.soak) for case in CASES],
)
@pytest.mark.usefixtures("alone")
def test_a_kill_at_every_call_of_save_model_leaves_the_old_or_the_new_one(
    memory: Path, before: str, after: str, with_state: bool
) -> None:
    place = memory / "state"
    trainee = Trainee(memory, numbered=False)
    (memory / "state").mkdir()
    (place / "mine.txt").write_text("mine")
    if with_state:
        trainee.save(50.0)
    replace_model(tensors(1.0), place, SIZES[before])
    replace_model(tensors(2.0), memory / "other", SIZES[before])
    replace_model(tensors(3.0), memory / "other", SIZES[after], disk=(disk := Dying(FAR)))
    old, published = 1.0, 0
    for fatal in range(1, disk.calls + 1):
        new = old + 1
        if with_state:
            trainee.save(50.0)  # its model file takes the place of the model's again
            replace_model(tensors(old), place, SIZES[before])
        with in_child() as here:
            if here:
                replace_model(tensors(new), place, SIZES[after], disk=Dying(fatal))
        found = load_ours(place)
        assert found in ({old}, {new}), f"at call {fatal} of {disk.calls}: {found}"
        for theirs in load_as_others_do(place):
            assert theirs in ({old}, {new}), f"others find {theirs} at call {fatal} of {disk.calls}"
        published += found == {new}
        if with_state:
            assert trainee.load() == 50.0
        assert (place / "mine.txt").read_text() == "mine"
        old = new + 1
        replace_model(tensors(old), place, SIZES[before])
        assert not [path for path in place.rglob("*") if path.name.startswith(".")]
        assert load_ours(place) == {old}
        assert load_as_others_do(place) == [{old}]
    assert 0 < published < disk.calls


@pytest.mark.usefixtures("alone")
def test_what_is_read_of_a_save_that_was_interrupted_is_logged(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainee = Trainee(memory, numbered=False)
    place = memory / "state"
    trainee.save(1.0)
    replace_model(tensors(1.0), memory / "model", SIZES["divided"])
    with in_child() as here:
        if here:
            trainee.save(2.0, Stopping())
    with in_child() as here:
        if here:
            replace_model(tensors(2.0), memory / "model", SIZES["divided"], disk=Stopping())
    assert trainee.load() == 2.0
    assert caplog.text.count(f"A save to {place} was interrupted after its commit") == 1
    assert main(["checkpoint", "verify", str(place)]) == 0
    for path in (memory / "model", memory / "model" / "model.safetensors.index.json"):
        caplog.clear()
        assert load_ours(path) == {2.0}
        assert caplog.text.count(f"A save to {memory / 'model'} was interrupted after its commit") == 1


class Stopping(Dying):
    """Ends the process right after the commit."""

    def __init__(self) -> None:
        super().__init__(FAR)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if target.name.endswith(".committed"):
            die(signal.SIGKILL)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder whose fsync costs nothing, where there is one: what matters here is the order of the calls."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)
