"""The power is lost at any call of a save: a committed checkpoint is found, the one before or a newer one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.checkpoint.prune import prune
from lockstep.errors import CheckpointError
from lockstep.model_files.save import replace_model
from lockstep.storage import commit
from tests.faults.power_loss import ForgetfulDisk, changes_besides, write_tree
from tests.faults.test_checkpoint_kills import SIZES, Trainee, load_as_others_do, load_ours, memory, tensors
from tests.ranks import in_soak

__all__ = ["memory"]
pytestmark = pytest.mark.usefixtures("alone")


class Scenario:
    """A folder with what is saved already, one more save, and what is found of it."""

    old: float | None = 1.0
    between: tuple[float, ...] = ()
    new = 2.0

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        self.prepare()

    def prepare(self) -> None: ...

    def save(self, disk: ForgetfulDisk) -> None:
        raise NotImplementedError

    def load(self, root: Path) -> float | None:
        """What is found there; None when there is nothing."""
        raise NotImplementedError


class States(Scenario):
    numbered, blocking, place = False, True, "state"

    def prepare(self) -> None:
        self.trainee = Trainee(self.root, self.numbered, self.blocking)
        if not self.numbered:
            self.trainee.place = self.root / self.place
        if self.old is not None:
            self.trainee.save(1.0)

    def save(self, disk: ForgetfulDisk) -> None:
        self.trainee.save(2.0, disk)  # type: ignore[arg-type]

    def load(self, root: Path) -> float | None:
        trainee = self.trainee
        if self.numbered:
            trainee.accelerator.project_configuration.project_dir = str(root)
        else:
            trainee.place = root / self.place
        if self.old is None and not (root / self.place).exists():
            return None
        return trainee.load()


class NewState(States):
    old, place = None, "a/b/state"


class Numbered(States):
    numbered = True

    def prepare(self) -> None:
        super().prepare()
        self.trainee.accelerator.project_configuration.iteration = 1


class InBackground(States):
    blocking = False


class Pruned(Numbered):
    """Three of which one is kept: the newest."""

    old = new = 3.0

    def prepare(self) -> None:
        super().prepare()
        self.trainee.accelerator.project_configuration.total_limit = 5
        for value in (2.0, 3.0):
            self.trainee.save(value)

    def save(self, disk: ForgetfulDisk) -> None:
        with commit.locked(self.root / "checkpoints", disk):
            assert len(prune(self.root / "checkpoints", 1, disk)) == 2


class Models(Scenario):
    before, after = "whole", "whole"

    def prepare(self) -> None:
        if self.old is not None:
            replace_model(tensors(1.0), self.root / "model", SIZES[self.before])

    def save(self, disk: ForgetfulDisk) -> None:
        replace_model(tensors(2.0), self.root / "model", SIZES[self.after], disk=disk)

    def load(self, root: Path) -> float | None:
        if self.old is None and not (root / "model").exists():
            return None
        (value,) = load_ours(root / "model")
        for theirs in load_as_others_do_if_they_can(root / "model"):
            assert theirs in ({1.0}, {2.0}, {3.0}), f"others find {theirs}"
        return value


def load_as_others_do_if_they_can(folder: Path) -> list[set[float]]:
    with suppress(OSError):  # an index that names a file which is not there yet
        return load_as_others_do(folder)
    return []


class NewModel(Models):
    old, after = None, "divided"


class DividedModels(Models):
    before = after = "divided"


class AfterAKill(DividedModels):
    """The save before was killed right after its commit: nothing says that this is on the medium."""

    between, new = (2.0,), 3.0

    def save(self, disk: ForgetfulDisk) -> None:
        class Killed(BaseException):
            pass

        def rename(source: Path, target: Path) -> None:
            ForgetfulDisk.rename(disk, source, target)
            if target.name.endswith(".committed"):
                raise Killed

        disk.rename = rename  # type: ignore[method-assign]
        with suppress(Killed):
            replace_model(tensors(2.0), self.root / "model", SIZES["divided"], disk=disk)
        del disk.rename
        replace_model(tensors(3.0), self.root / "model", SIZES["divided"], disk=disk)


class DividedToWhole(Models):
    before = "divided"


class WholeToDivided(Models):
    after = "divided"


class ModelBesideState(Models):
    """The state's own model file is moved away first, and the state is found all the same."""

    before = after = "divided"

    def prepare(self) -> None:
        self.trainee = Trainee(self.root, numbered=False)
        self.trainee.place = self.root / "model"
        self.trainee.save(7.0)
        (self.root / "model" / "mine.txt").write_text("mine")

    def load(self, root: Path) -> float | None:
        self.trainee.place = root / "model"
        assert self.trainee.load() == 7.0
        assert (root / "model" / "mine.txt").read_text() == "mine"
        index = root / "model" / "model.safetensors.index.json"
        try:
            (value,) = load_ours(index)
        except CheckpointError:
            return None
        return value

    old = None


SCENARIOS = [
    States, NewState, Numbered, Pruned, Models, NewModel, DividedModels, AfterAKill, DividedToWhole,
    WholeToDivided, ModelBesideState, *in_soak(InBackground),
]  # fmt: skip


def losses(kind: type[Scenario], folder: Path, skip: int = 0) -> tuple[list[str], ForgetfulDisk]:
    """What is wrong after a power loss at any call, and after the save has returned; the disk, with its calls."""
    scenario = kind(folder / "root")
    disk = ForgetfulDisk(scenario.root, skip)
    with changes_besides(scenario.root) as besides:
        scenario.save(disk)
    assert besides == [], "calls that do not go through the disk"
    found = [(where, tree, {scenario.old, *scenario.between, scenario.new}) for where, tree in disk.crashes.values()]
    found += [("the end", tree, {scenario.new}) for tree in disk.after_power_loss()]
    wrong = []
    for number, (where, tree, allowed) in enumerate(found):
        back = folder / f"back{number}"
        write_tree(tree, back)
        try:
            value = scenario.load(back)
            if value not in allowed:
                wrong.append(f"{where}: {value}, expected one of {allowed}")
        except (CheckpointError, AssertionError, OSError) as error:
            wrong.append(f"{where}: {error}")
        shutil.rmtree(back)
    return wrong, disk


@pytest.mark.parametrize("kind", SCENARIOS)
def test_a_power_loss_at_every_call_leaves_a_committed_checkpoint(
    memory: Path, kind: type[Scenario], note: Callable[..., None]
) -> None:
    wrong, disk = losses(kind, memory)
    assert wrong == []
    assert len(disk.crashes) > 10
    note(f"power loss, {kind.__name__}: {len(disk.calls)} calls, {disk.syncs} syncs, {len(disk.crashes)} outcomes")


@pytest.mark.parametrize("kind", [NewModel, *in_soak(DividedModels, States, NewState, Numbered, InBackground)])
def test_each_sync_is_needed(memory: Path, kind: type[Scenario]) -> None:
    """Without any one of them something is lost: so the test above would notice."""
    _, disk = losses(kind, memory / "all")
    for skip in range(1, disk.syncs + 1):
        wrong, _ = losses(kind, memory / str(skip), skip)
        assert wrong, f"sync {skip} of {disk.syncs} can be left out"
