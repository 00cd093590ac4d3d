"""Which files of a folder are read: those that the manifest lists, each opened once; and which layouts stay valid."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep import Accelerator, load_checkpoint_in_model
from lockstep.checkpoint import discovery
from lockstep.checkpoint.state_files import StateFiles
from lockstep.cli import main
from lockstep.errors import CheckpointError
from lockstep.storage import manifest

pytestmark = pytest.mark.usefixtures("alone")


def prepared(value: float) -> tuple[Accelerator, nn.Module]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(3, 3))
    fill(model, value)
    return accelerator, model


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(model: nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in parameter.flatten().tolist()}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A checkpoint of ones."""
    accelerator, _ = prepared(1.0)
    accelerator.save_state(tmp_path / "state")
    return tmp_path / "state"


def loaded(folder: Path) -> set[float]:
    accelerator, model = prepared(5.0)
    accelerator.load_state(folder)
    return values(model)


# ---------------------------------------------------------------- planted files


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors.index.json", "model_1.safetensors"])
def test_a_planted_file_is_not_read(tmp_path: Path, state: Path, name: str, linked: bool) -> None:
    other = nn.Linear(3, 3)
    fill(other, 9.0)
    planted = tmp_path / "elsewhere" if linked else state / name
    if name.endswith(".json"):
        planted.write_text(json.dumps({"weight_map": {"weight": "evil.safetensors"}}))
    else:
        torch.save(other.state_dict(), planted)
    if linked:
        (state / name).symlink_to(planted)
    assert loaded(state) == {1.0}
    assert discovery.verify(state) == []
    assert name in discovery.additional(state)


def test_a_model_that_was_saved_there_before_is_not_read(tmp_path: Path) -> None:
    accelerator, model = prepared(7.0)
    accelerator.save_model(model, tmp_path / "state")
    fill(model, 1.0)
    accelerator.save_state(tmp_path / "state", safe_serialization=False)
    assert (tmp_path / "state" / "model.safetensors").exists()
    assert loaded(tmp_path / "state") == {1.0}
    assert discovery.additional(tmp_path / "state") == ["model.safetensors"]


def test_a_folder_in_the_place_of_the_models_may_not_be_a_link(tmp_path: Path) -> None:
    accelerator, model = prepared(1.0)
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "state")  # the state's own file is in a folder now
    inside = next(name for name in manifest.read(tmp_path / "state").files if "/" in name)
    folder = tmp_path / "state" / Path(inside).parent
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=inside):
        loaded(tmp_path / "state")
    assert any(inside in line for line in discovery.verify(tmp_path / "state"))


def test_what_is_opened_is_what_is_read(state: Path) -> None:
    """A file that takes the place of another one after that was opened has no effect."""
    files = StateFiles(state, manifest.read(state))
    with closing(files):
        before = os.open(state / "model.safetensors", os.O_RDONLY)
        with files.opened("model.safetensors") as first:
            (state / "model.safetensors").rename(state / "away")
            (state / "model.safetensors").write_bytes(b"another")
            second = files.open(state / "model.safetensors")
        assert os.fstat(second).st_ino == os.fstat(first).st_ino == os.fstat(before).st_ino
        os.close(second)
        os.close(before)
        with pytest.raises(CheckpointError, match="does not list it"):
            files.open(state / "away")


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of thousands of ranks has thousands of files."""
    accelerator, _ = prepared(1.0)

    def add(models: list[nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
        for number in range(400):
            Path(folder, f"part_{number}").write_bytes(bytes([number % 256]))

    accelerator.register_save_state_pre_hook(add)
    accelerator.save_state(tmp_path / "state", durable=False)
    before = len(os.listdir("/proc/self/fd"))
    files = StateFiles(tmp_path / "state", found := manifest.read(tmp_path / "state"))
    with closing(files):
        for name in found.files:
            with files.opened(name) as descriptor:
                assert os.fstat(descriptor).st_size == found.files[name].size
        assert len(os.listdir("/proc/self/fd")) - before <= 256
    assert len(os.listdir("/proc/self/fd")) == before
    assert loaded(tmp_path / "state") == {1.0}


# ---------------------------------------------------------------- what stays valid


def test_the_folder_itself_may_be_behind_links(tmp_path: Path, state: Path) -> None:
    (tmp_path / "disk").mkdir()
    state.rename(tmp_path / "disk" / "real")
    (tmp_path / "latest").symlink_to("disk/real")
    (tmp_path / "parent").symlink_to("disk")
    assert loaded(tmp_path / "latest") == {1.0}
    assert loaded(tmp_path / "parent" / "real") == {1.0}
    assert discovery.verify(tmp_path / "latest") == []


def test_files_may_have_further_names(tmp_path: Path, state: Path) -> None:
    """As a backup by hard links, or rsync --link-dest, makes them."""
    shutil.copytree(state, tmp_path / "backup", copy_function=os.link)
    assert loaded(tmp_path / "backup") == {1.0}


def test_a_folder_that_may_only_be_read(tmp_path: Path, state: Path) -> None:
    for path in state.iterdir():
        path.chmod(0o444)
    state.chmod(0o555)
    assert loaded(state) == {1.0}
    state.chmod(0o755)


@pytest.mark.parametrize("shards", ["10GB", 16])
@pytest.mark.parametrize("safe", [True, False])
def test_a_model_in_the_hubs_cache_is_links(tmp_path: Path, shards: int | str, safe: bool) -> None:
    """snapshots/<commit>/<name> points to blobs/<hash>."""
    accelerator, model = prepared(3.0)
    accelerator.save_model(model, tmp_path / "saved", max_shard_size=shards, safe_serialization=safe)
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate((tmp_path / "saved").iterdir()):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    other = nn.Linear(3, 3)
    load_checkpoint_in_model(other, snapshot, strict=True)
    assert values(other) == {3.0}


def test_a_folder_of_accelerates_may_have_links(tmp_path: Path, state: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (manifest.NAME, "lockstep_state.json"):
        (state / name).unlink()
    (state / "model.safetensors").rename(tmp_path / "large")
    (state / "model.safetensors").symlink_to(tmp_path / "large")
    assert loaded(state) == {1.0}
    assert "were not verified" in caplog.text


# ---------------------------------------------------------------- the command


def test_verify_lists_what_is_not_part_of_it(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (state / "notes.txt").write_text("mine")
    (state / "logs").mkdir()
    (state / "logs" / "a\x1b[2J.log").write_text("mine")
    assert main(["checkpoint", "verify", str(state)]) == 0
    printed = capsys.readouterr().out
    assert "not part of it" in printed
    assert "notes.txt" in printed
    assert "\x1b[2J" not in printed
    assert main(["checkpoint", "verify", str(state), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["additional"] == ["logs/a\x1b[2J.log", "notes.txt"]


@pytest.mark.parametrize("how", ["replaced", "linked"])
def test_verify_finds_what_was_replaced(
    tmp_path: Path, state: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = state / "model.safetensors"
    data = bytearray(path.read_bytes())
    if how == "linked":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        data[-1] ^= 1
        path.write_bytes(data)
    assert main(["checkpoint", "verify", str(state)]) == 1
    assert "model.safetensors" in capsys.readouterr().out
