"""save_state and load_state on one process: names, limits, hooks, refusals, and what a damaged folder does."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator, load_checkpoint_in_model
from lockstep.checkpoint import discovery, safe_pickle
from lockstep.errors import CheckpointError, ConfigError
from lockstep.storage import manifest
from lockstep.storage.disk import Disk
from lockstep.storage.model_file_names import layout_of
from lockstep.utils import ProjectConfiguration
from tests.unit.checkpoint.runs import Run

pytestmark = pytest.mark.usefixtures("alone")


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# ---------------------------------------------------------------- names and numbers


def test_numbered_folders_of_which_the_newest_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, limit=2)
    for number in range(4):
        assert run.accelerator.save_state() == str(tmp_path / "checkpoints" / f"checkpoint_{number}")
        assert run.accelerator.save_iteration == number + 1
    assert checkpoints(tmp_path) == ["checkpoint_2", "checkpoint_3"]


def test_a_restarted_run_goes_on_with_the_next_number(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.accelerator.load_state() is None  # nothing yet: a script can always ask
    run.train(2).accelerator.save_state()
    again = Run(tmp_path)
    assert again.accelerator.load_state() == str(tmp_path / "checkpoints" / "checkpoint_0")
    again.train(1).accelerator.save_state()
    assert checkpoints(tmp_path) == ["checkpoint_0", "checkpoint_1"]


def test_a_run_that_loaded_nothing_does_not_write_over_another(tmp_path: Path) -> None:
    Run(tmp_path).accelerator.save_state()
    other = Run(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint_0 exists already.*load_state\(\) before"):
        other.accelerator.save_state()
    assert checkpoints(tmp_path) == ["checkpoint_0"]


def test_without_a_folder_it_says_what_to_pass() -> None:
    for method in ("save_state", "load_state"):
        with pytest.raises((ConfigError, CheckpointError), match="given no folder"):
            getattr(Run().accelerator, method)()


def test_what_else_is_in_the_folder_stays(tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    (place / "logs").mkdir()
    (place / "logs" / "a.log").write_text("mine too")
    run = Run()
    for _ in range(3):
        run.accelerator.save_state(place)
        assert (place / "notes.txt").read_text() == "mine"
        assert (place / "logs" / "a.log").read_text() == "mine too"
    assert discovery.verify(place) == []
    assert os.listdir(tmp_path) == ["out"]


# ---------------------------------------------------------------- a state and a model in one folder


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(model: nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in parameter.flatten().tolist()}


@pytest.mark.parametrize("state_safe", [True, False])
@pytest.mark.parametrize("model_safe", [True, False])
@pytest.mark.parametrize("shards", ["10GB", 40])
def test_a_state_and_a_model_in_one_folder_can_both_be_loaded(
    tmp_path: Path, state_safe: bool, model_safe: bool, shards: int | str
) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    for number in range(3):
        fill(model, 1.0 + number)
        accelerator.save_state(tmp_path, safe_serialization=state_safe)
        for further in range(2):
            fill(model, 10.0 + further)
            accelerator.save_model(model, tmp_path, max_shard_size=shards, safe_serialization=model_safe)
        assert discovery.verify(tmp_path) == []
        accelerator.load_state(tmp_path)
        assert values(model) == {1.0 + number}
        fresh = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        layout = layout_of("model", model_safe)
        load_checkpoint_in_model(fresh, tmp_path / (layout.whole if shards == "10GB" else layout.index))
        assert values(fresh) == {11.0}
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("shards", ["10GB", 40])
def test_a_model_that_is_there_before_the_state_is_not_taken_for_it(tmp_path: Path, shards: int | str) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    fill(model, 7.0)
    accelerator.save_model(model, tmp_path, max_shard_size=shards)
    fill(model, 1.0)
    accelerator.save_state(tmp_path)
    fill(model, 2.0)
    accelerator.load_state(tmp_path)
    assert values(model) == {1.0}


# ---------------------------------------------------------------- what cannot be saved or loaded


def test_registered_objects_need_their_two_methods() -> None:
    with pytest.raises(ConfigError, match=r"a list \(argument 2\), a int \(argument 3\)"):
        Run().accelerator.register_for_checkpointing(nn.Linear(1, 1), [], 3)


class Odd:
    def state_dict(self) -> dict[str, Any]:
        return {"callback": print}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_state_that_needs_code_is_refused_by_name_and_the_old_one_stays(tmp_path: Path) -> None:
    run = Run().train(1)
    run.accelerator.save_state(tmp_path / "state")
    before = (tmp_path / "state" / manifest.NAME).read_bytes()
    run.accelerator.register_for_checkpointing(Odd())
    with pytest.raises(CheckpointError, match=r"Odd \(number 1 of .*state_dict\(\)\['callback'\]"):
        run.accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / manifest.NAME).read_bytes() == before
    assert os.listdir(tmp_path) == ["state"]
    assert run.train(1) is run


def test_objects_must_be_those_that_were_saved(tmp_path: Path) -> None:
    Run().accelerator.save_state(tmp_path / "state")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(4, 6))
    with pytest.raises(CheckpointError, match=r"with 1 objects registered for checkpointing \(here 0\)\. Prepare"):
        accelerator.load_state(tmp_path / "state")


def test_another_model_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    Run().train(3).accelerator.save_state(tmp_path / "state")
    run = Run()
    run.accelerator.unwrap_model(run.model)[0] = nn.Linear(4, 7)
    before = run.weights()
    with pytest.raises(CheckpointError, match=r"0\.weight has shape \(6, 4\) there"):
        run.accelerator.load_state(tmp_path / "state")
    assert torch.equal(run.weights(), before)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.bin", "large optimizer.bin", "random_states_0.pkl", "lockstep_state.json"],
)
@pytest.mark.parametrize("how", ["flipped", "cut", "missing", "foreign", "linked"])
def test_a_damaged_file_is_named_and_nothing_is_touched(
    tmp_path: Path, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("large "):
        name = name.removeprefix("large ")
        monkeypatch.setattr(safe_pickle, "LARGE", 0)
    Run().train(3).accelerator.save_state(tmp_path / "state")
    path = tmp_path / "state" / name
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif how == "cut":
        path.write_bytes(data[:-1])
    elif how == "missing":
        path.unlink()
    elif how == "foreign":
        path.write_bytes(os.urandom(len(data)))
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    run = Run().train(4)  # in the middle of a window: there are gradients
    before, gradients = run.result(), [parameter.grad.tolist() for parameter in run.model.parameters()]
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        run.accelerator.load_state(tmp_path / "state")
    assert {**run.result(), "draw": None} == {**before, "draw": None}
    assert [parameter.grad.tolist() for parameter in run.model.parameters()] == gradients
    assert run.accelerator.step == 4


def test_the_newest_whole_one_is_taken_and_the_others_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    for _ in range(4):
        run.train(1).accelerator.save_state()
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_3" / manifest.NAME).unlink()
    path = folder / "checkpoint_2" / "optimizer.bin"
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    again = Run(tmp_path)
    assert again.accelerator.load_state() == str(folder / "checkpoint_1")
    told = [record.message for record in caplog.records if "skipped" in record.message]
    assert len(told) == 2
    assert "checkpoint_3 was skipped" in told[0]
    assert "no complete checkpoint" in told[0]
    assert "optimizer.bin is damaged" in told[1]
    assert again.average.count == 2
    again.accelerator.save_state()  # past those that are there
    assert "checkpoint_4" in checkpoints(tmp_path)


def test_when_none_is_whole_each_reason_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(2):
        run.accelerator.save_state()
    for number in range(2):
        (tmp_path / "checkpoints" / f"checkpoint_{number}" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"(?s)checkpoint_1 was skipped.*checkpoint_0 was skipped"):
        Run(tmp_path).accelerator.load_state()


def test_a_half_written_folder_is_no_checkpoint(tmp_path: Path) -> None:
    Run(tmp_path).train(1).accelerator.save_state()
    half = tmp_path / "checkpoints" / "checkpoint_7"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"\0" * 100)
    assert Run(tmp_path).accelerator.load_state() == str(tmp_path / "checkpoints" / "checkpoint_0")


def test_pruning_counts_whole_ones_only(tmp_path: Path) -> None:
    run = Run(tmp_path, limit=2)
    for _ in range(2):
        run.accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_1" / "model.safetensors").unlink()
    run.accelerator.save_state()
    # The damaged one does not count, so the older whole one is still there to go back to.
    assert checkpoints(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]


def test_a_checkpoint_of_the_first_version_is_read(tmp_path: Path) -> None:
    """As this release wrote it: a later one must go on reading it."""
    saved = Path(__file__).parent / "version_1"
    shutil.copytree(saved, tmp_path / "state")
    run = Run()
    run.accelerator.load_state(tmp_path / "state")
    assert run.average.count == 4
    expected = json.loads((saved.parent / "version_1.json").read_text())
    result = run.train().result()
    assert result["average"][1] == expected["average"][1]
    apart = (torch.tensor(result["weights"]) - torch.tensor(expected["weights"])).abs().max().item()
    assert apart < 0.05, apart  # the number of threads changes how sums round, and Adam makes more of it


# ---------------------------------------------------------------- hooks


def test_hooks_may_write_and_read_models_themselves(tmp_path: Path) -> None:
    run = Run()

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        os.mkdir(os.path.join(folder, "mine"))
        torch.save(weights.pop(), os.path.join(folder, "mine", "weights.pt"))

    def load(models: list[nn.Module], folder: str) -> None:
        run.accelerator.unwrap_model(models.pop()).load_state_dict(
            torch.load(os.path.join(folder, "mine", "weights.pt"))
        )

    handles = [
        run.accelerator.register_save_state_pre_hook(save),
        run.accelerator.register_load_state_pre_hook(load),
    ]
    run.accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state" / "model.safetensors").exists()
    assert "mine/weights.pt" in manifest.read(tmp_path / "state").files
    before = run.weights()
    run.train(3)
    run.accelerator.load_state(tmp_path / "state")
    assert torch.equal(run.weights(), before)
    for handle in handles:
        handle.remove()
    run.accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "model.safetensors").exists()


def test_links_and_pipes_of_hooks_are_not_part_of_it(tmp_path: Path) -> None:
    """They would not be read again: the checkpoint could be saved, and never loaded."""
    run = Run()

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        os.symlink(tmp_path / "elsewhere", os.path.join(folder, "link"))
        os.mkfifo(os.path.join(folder, "pipe"))

    (tmp_path / "elsewhere").write_text("mine")
    run.accelerator.register_save_state_pre_hook(save)
    run.accelerator.save_state(tmp_path / "state")
    assert not {"link", "pipe"} & set(manifest.read(tmp_path / "state").files)
    assert discovery.verify(tmp_path / "state") == []
    run.accelerator.load_state(tmp_path / "state")


def test_a_hook_that_fails_fails_the_save(tmp_path: Path) -> None:
    run = Run()
    run.accelerator.register_save_state_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        run.accelerator.save_state(tmp_path / "state")
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- in the background


def test_a_failure_in_the_background_is_told_at_the_next_call(tmp_path: Path) -> None:
    run = Run()
    run.accelerator.save_state(tmp_path / "state", blocking=False)
    run.accelerator.wait_for_checkpoint()
    run.accelerator._checkpoints.disk = Full()
    run.accelerator.save_state(tmp_path / "state", blocking=False)
    with pytest.raises(CheckpointError, match="No space left"):
        run.accelerator.save_state(tmp_path / "state", blocking=False)
    run.accelerator._checkpoints.disk = Full(FREE)
    run.accelerator.save_state(tmp_path / "state", blocking=False)
    run.accelerator.wait_for_checkpoint()
    assert discovery.verify(tmp_path / "state") == []
    assert os.listdir(tmp_path) == ["state"]


FREE = 1 << 40


class Full(Disk):
    """A disk with room for so many bytes."""

    def __init__(self, room: int = 2000) -> None:
        self.room = room

    def write(self, file: int, data: memoryview) -> int:
        if self.room < len(data):
            raise OSError(28, "No space left on device")
        self.room -= len(data)
        return super().write(file, data)


# ---------------------------------------------------------------- the run's set-up


def test_another_effective_batch_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run().train(4).accelerator.save_state(tmp_path / "state")
    run = Run(gradient_accumulation_steps=5)
    run.accelerator.load_state(tmp_path / "state")
    run.train()
    assert [record.message for record in caplog.records if "effective batch of 6" in record.message]


def test_a_folder_of_accelerates_is_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a manifest, and with names as its DDP models have them."""
    run = Run().train(3)
    run.accelerator.save_state(tmp_path / "state", safe_serialization=False)
    for name in (manifest.NAME, "lockstep_state.json", "dl_state_dict.bin", "gradients_0.bin"):
        (tmp_path / "state" / name).unlink(missing_ok=True)
    path = tmp_path / "state" / "pytorch_model.bin"
    torch.save({f"module.{name}": value for name, value in torch.load(path).items()}, path)
    other = Run()
    other.accelerator.load_state(tmp_path / "state")
    assert torch.equal(other.weights(), run.weights())
    assert any("were not verified" in record.message for record in caplog.records)


def test_a_project_without_folder_is_told(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    with pytest.raises((ConfigError, CheckpointError), match="needs a project_dir"):
        accelerator.save_state()


def test_a_folder_that_is_not_used_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.save_state()
    assert "save_state(" not in caplog.text
    assert accelerator.save_state("own") == str(tmp_path / "checkpoints" / "checkpoint_1")
    accelerator.save_state("own")
    found = [record.getMessage() for record in caplog.records if "save_state('own')" in record.getMessage()]
    assert len(found) == 1
    assert (
        f"saves to {tmp_path}/checkpoints/checkpoint_1: automatic_checkpoint_naming=True names the folders" in found[0]
    )


def test_shared_tensors_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    tensor = torch.ones(2)
    state = {"a": tensor, "b": tensor, "c": torch.zeros(1)}
    accelerator.save(state, tmp_path / "file.safetensors", safe_serialization=True)
    assert "b and a are the same tensor" in caplog.text
    caplog.clear()
    accelerator.save({"a": tensor, "b": tensor.clone()}, tmp_path / "file.safetensors", safe_serialization=True)
    accelerator.save(state, tmp_path / "file.bin")
    assert caplog.text == ""


def test_other_tools_find_their_checksums(tmp_path: Path) -> None:
    """The switch for torch's checksums is the whole process's: files that other threads write would miss theirs."""
    Run().train(3).accelerator.save_state(tmp_path / "state", safe_serialization=False)
    archives = [path for path in (tmp_path / "state").iterdir() if path.suffix in (".bin", ".pkl", ".pt")]
    assert {path.name for path in archives} > {"pytorch_model.bin", "optimizer.bin", "random_states_0.pkl"}
    assert {path.name: zipfile.ZipFile(path).testzip() for path in archives} == dict.fromkeys(
        (path.name for path in archives), None
    )


def test_a_state_needs_no_checksums_of_torch(tmp_path: Path) -> None:
    """Its manifest has better ones."""
    torch.serialization.set_crc32_options(False)
    try:
        run = Run().train(3)
        run.accelerator.save_state(tmp_path / "state", safe_serialization=False)
    finally:
        torch.serialization.set_crc32_options(True)
    again = Run()
    again.accelerator.load_state(tmp_path / "state")
    assert torch.equal(again.weights(), run.weights())
