"""Where a state can be saved: any folder, which is never renamed or removed itself, with whatever else is in it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import load_checkpoint_in_model
from lockstep.checkpoint import discovery
from lockstep.errors import CheckpointError
from lockstep.model_files.save import replace_model
from lockstep.storage import manifest
from lockstep.storage.commit import Staging
from lockstep.storage.disk import Disk
from tests.unit.checkpoint.runs import Run

pytestmark = pytest.mark.usefixtures("alone")


def check(run: Run, place: Path | str, again: bool = True) -> None:
    """The state that is there is what the run has now; and another one can be saved over it."""
    before = run.weights()
    run.train(1)
    run.accelerator.load_state(place)
    assert torch.equal(run.weights(), before)
    assert discovery.verify(Path(place)) == []
    assert not [name for name in os.listdir(place) if name.startswith(".")]
    if again:
        run.train(1).accelerator.save_state(place)
        check(run, place, again=False)


def test_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "train.py").write_text("mine")
    monkeypatch.chdir(here)
    identity = os.stat(".").st_ino
    run = Run().train(1)
    run.accelerator.save_state(".")
    check(run, ".")
    run.accelerator.save_model(run.model, ".")
    assert os.getcwd() == str(here)
    assert os.stat(".").st_ino == os.stat(here).st_ino == identity
    assert Path("train.py").read_text() == "mine"
    assert os.listdir(tmp_path) == ["here"]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    place = tmp_path / "mounted"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_mount_point(mounted: Path) -> None:
    (mounted / "lost+found").mkdir()
    run = Run().train(1)
    run.accelerator.save_state(mounted)
    check(run, mounted)
    run.accelerator.save_model(run.model, mounted, max_shard_size=40)
    assert os.path.ismount(mounted)
    assert (mounted / "lost+found").is_dir()
    assert os.listdir(mounted.parent) == ["mounted"]


@pytest.mark.parametrize("letter", ["x", "\u00fc"])
def test_a_name_as_long_as_the_file_system_takes(tmp_path: Path, letter: str) -> None:
    place = tmp_path / (letter * (255 // len(letter.encode())))
    run = Run().train(1)
    run.accelerator.save_state(place)
    check(run, place)
    assert os.listdir(tmp_path) == [place.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="another root directory needs root")
def test_the_root_of_the_file_system(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    # A process of its own, which has loaded all it needs before it can see no files but these.
    script = f"""
import os, sys
sys.path.insert(0, {os.getcwd()!r})
from tests.unit.checkpoint.runs import Run
from tests.unit.checkpoint.test_places import check
run = Run().train(1)
run.accelerator.save_state({str(tmp_path / "before")!r})
check(run, {str(tmp_path / "before")!r})
os.chroot({str(root)!r})
os.chdir("/")
run.accelerator.save_state("/")
check(run, "/")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in os.listdir(root)


@pytest.mark.parametrize("exists", [True, False], ids=["there", "to be made"])
def test_a_link_to_a_folder_on_another_disk(tmp_path: Path, mounted: Path, exists: bool) -> None:
    target, link = mounted / "big", tmp_path / "small"
    link.symlink_to(target)
    if exists:
        target.mkdir()
    run = Run().train(1)
    hook = run.accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: _write(Path(folder, "sub", "x"))
    )
    run.accelerator.save_state(link)
    check(run, link)
    assert link.is_symlink()
    assert (target / manifest.NAME).is_file()
    hook.remove()
    run.accelerator.save_state(link)
    assert not (target / "sub").exists()
    assert os.listdir(mounted) == ["big"]
    run.accelerator.save_model(run.model, tmp_path / "small")
    assert link.is_symlink()


class Inside(Disk):
    """Notes what changes outside of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.outside = folder, set[str]()

    def open(self, path: Path) -> int:
        self._see(path)
        return super().open(path)

    def mkdir(self, folder: Path) -> None:
        self._see(folder)
        super().mkdir(folder)

    def rename(self, source: Path, target: Path) -> None:
        self._see(source, target)
        super().rename(source, target)

    def _see(self, *paths: Path) -> None:
        self.outside |= {str(path) for path in paths if self.folder not in path.parents}


def test_a_folder_whose_parent_is_not_ours(tmp_path: Path) -> None:
    """Nothing is written beside a place that exists."""
    place = tmp_path / "given"
    place.mkdir()
    run = Run().train(1)
    disk = run.accelerator._checkpoints.disk = Inside(place)
    run.accelerator.save_state(place)
    check(run, place)
    assert disk.outside == set()


def test_folders_above_are_made_and_synced(tmp_path: Path) -> None:
    class Syncs(Disk):
        def __init__(self) -> None:
            self.synced: list[Path] = []

        def fsync_folder(self, folder: Path) -> None:
            self.synced.append(folder)
            super().fsync_folder(folder)

    run = Run().train(1)
    disk = run.accelerator._checkpoints.disk = Syncs()
    place = tmp_path / "a" / "b" / "c" / "state"
    run.accelerator.save_state(place)
    check(run, place)
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"} <= set(disk.synced)


def test_files_of_the_users_stay_wherever_they_are(tmp_path: Path) -> None:
    place = tmp_path / "out"
    run = Run().train(1)

    def hook(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        os.makedirs(os.path.join(folder, "extra", "deep"))
        Path(folder, "extra", "deep", "ours.txt").write_text("ours")

    handle = run.accelerator.register_save_state_pre_hook(hook)
    run.accelerator.save_state(place)
    mine = ["notes.txt", "extra/mine.txt", "extra/deep/mine.txt", ".hidden", "model_of_mine.bin"]
    for name in mine:
        (place / name).write_text(name)
    (place / "link").symlink_to("/nowhere")
    for number in range(3):
        if number == 2:
            handle.remove()  # what the hook wrote is not a part of the next state
        run.train(1).accelerator.save_state(place)
        assert all((place / name).read_text() == name for name in mine)
        assert os.readlink(place / "link") == "/nowhere"
        assert (place / "extra" / "deep" / "ours.txt").exists() == (number < 2)
        assert discovery.verify(place) == []


def test_nothing_is_committed_where_something_of_the_users_is_in_the_way(tmp_path: Path) -> None:
    place = tmp_path / "out"
    run = Run().train(1)
    run.accelerator.save_state(place)
    (place / "optimizer.bin").unlink()
    (place / "optimizer.bin" / "mine").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"out/optimizer\.bin is a folder.*Move it away"):
        run.accelerator.save_state(place)
    assert (place / "optimizer.bin" / "mine").is_dir()
    shutil.rmtree(place / "optimizer.bin")
    run.accelerator.save_state(place)
    check(run, place)


def test_a_folder_that_a_hook_makes_meanwhile(tmp_path: Path) -> None:
    place = tmp_path / "out"
    run = Run().train(1)

    def hook(*_: Any) -> None:
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text("mine")

    run.accelerator.register_save_state_pre_hook(hook)
    run.accelerator.save_state(place)
    assert (place / "config.json").read_text() == "mine"
    check(run, place)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("has_links", [True, False], ids=["hard links", "no hard links"])
def test_links_and_pipes_of_a_hook_are_no_obstacle(tmp_path: Path, has_links: bool) -> None:
    class Without(Disk):
        def link(self, path: Path, name: Path) -> None:
            raise OSError(errno.EPERM, "no links here")

    place = tmp_path / "out"
    place.mkdir()
    run = Run().train(1)

    def hook(_: Any, __: Any, folder: str) -> None:
        os.symlink("model.safetensors", os.path.join(folder, "latest"))
        os.symlink("/", os.path.join(folder, "root"))
        os.mkfifo(os.path.join(folder, "pipe"))

    run.accelerator.register_save_state_pre_hook(hook)
    run.accelerator._checkpoints.disk = Disk() if has_links else Without()
    for _ in range(2):
        run.accelerator.save_state(place)
        assert os.readlink(place / "latest") == "model.safetensors"
        assert os.readlink(place / "root") == "/"
    check(run, place)


def test_a_file_is_not_a_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file is a file"):
        Run().accelerator.save_state(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_listed_file_behind_a_link_is_not_removed(tmp_path: Path) -> None:
    """A folder from somewhere else, whose manifest lists what a link leads to."""
    place, outside = tmp_path / "out", tmp_path / "outside"
    run = Run().train(1)
    run.accelerator.register_save_state_pre_hook(lambda models, weights, folder: _write(Path(folder, "sub", "x")))
    run.accelerator.save_state(place)
    shutil.move(place / "sub", outside)
    (place / "sub").symlink_to(outside)
    other = Run().train(1)
    other.accelerator.save_state(place)
    assert (outside / "x").exists()
    check(other, place)


def _write(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")


# ---------------------------------------------------------------- a model beside a state


def test_a_foreign_overwrite_is_named(tmp_path: Path) -> None:
    run = Run().train(1)
    run.accelerator.save_state(tmp_path)
    path = tmp_path / "model.safetensors"
    for data in (b"short", path.read_bytes()[:-1] + b"\1"):
        path.write_bytes(data)
        saved = os.stat(tmp_path / manifest.NAME).st_mtime
        os.utime(path, (saved + 100, saved + 100))
        with pytest.raises(CheckpointError, match=r"model\.safetensors was overwritten at .* after the checkpoint"):
            run.accelerator.load_state(tmp_path)


def test_a_save_of_a_model_waits_for_the_state_in_the_background(tmp_path: Path) -> None:
    run = Run().train(1)
    run.accelerator.save_state(tmp_path / "out", blocking=False)
    saved = run.weights()
    run.train(1)
    run.accelerator.save_model(run.model, tmp_path / "out")
    run.accelerator.wait_for_checkpoint()
    fresh = Run()
    load_checkpoint_in_model(fresh.model, tmp_path / "out", strict=True)
    assert torch.equal(fresh.weights(), run.weights())
    run.accelerator.load_state(tmp_path / "out")
    assert torch.equal(run.weights(), saved)


def test_a_link_that_is_called_committed_is_not_followed(tmp_path: Path) -> None:
    replace_model({"a": torch.zeros(1)}, tmp_path / "planted")
    replace_model({"a": torch.ones(1)}, tmp_path / "model")
    (tmp_path / "model" / f".lockstep.{'0' * 16}.committed").symlink_to(tmp_path / "planted")
    model = nn.Module()
    model.a = nn.Parameter(torch.full((1,), 5.0))
    load_checkpoint_in_model(model, tmp_path / "model")
    assert model.a.item() == 1.0


def test_a_save_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    Staging(tmp_path / "new", Disk()).close()
    assert os.listdir(tmp_path) == []
