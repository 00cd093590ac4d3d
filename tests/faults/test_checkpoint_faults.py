"""Disks that are full and ranks that die in the middle of a save: what is told, and what is still there."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.checkpoint import discovery
from lockstep.errors import CheckpointError
from lockstep.testing import run_ranks
from tests.faults.dying import Dying
from tests.unit.checkpoint.runs import Run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for little."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_a_full_disk_costs_the_new_checkpoint_only(small_disk: Path, blocking: bool) -> None:
    run = Run(small_disk).train(1)
    run.accelerator.save_state()
    ballast = small_disk / "ballast"
    statistics = os.statvfs(small_disk)
    ballast.write_bytes(b"\0" * (statistics.f_bavail * statistics.f_frsize - 20_000))

    def save() -> None:
        run.accelerator.save_state(blocking=blocking)
        run.accelerator.wait_for_checkpoint()

    with pytest.raises(CheckpointError, match="No space left on device"):
        save()
    folder = small_disk / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["checkpoint_0"]
    assert discovery.verify(folder / "checkpoint_0") == []
    ballast.unlink()
    run.train(1)
    save()
    assert len([path for path in folder.iterdir() if discovery.verify(path) == []]) == 2


@pytest.fixture
def few_files(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for few files."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=64", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
def test_a_disk_with_room_for_so_many_files_more(few_files: Path, blocking: bool) -> None:
    """The first that does not fit is another one each time: the lock, a folder, a file, the manifest."""
    place = few_files / "state"
    run = Run(samples=60).train(1)
    run.accelerator.save_state(place)
    failed = 0
    for left in (0, 1, 2, 5, 8, 9, 10, 11, 14):
        ballast = [few_files / f"ballast{number}" for number in range(os.statvfs(few_files).f_ffree - left)]
        for path in ballast:
            path.touch()
        old = run.average.count
        run.train(1)
        try:
            run.accelerator.save_state(place, blocking=blocking)
            run.accelerator.wait_for_checkpoint()
        except CheckpointError as error:
            failed += "No space left on device" in str(error)
            expected = old + ("is saved and can be loaded" in str(error))
        else:
            expected = old + 1
        assert discovery.verify(place) == []
        again = Run(samples=60)
        again.accelerator.load_state(place)
        assert again.average.count == expected, left
        for path in ballast:
            path.unlink()
        run.accelerator.save_state(place)
        assert not list(few_files.rglob(".*"))
    assert failed == 7


def save_and_die(folder: str, who: int, fatal: int, blocking: bool) -> None:
    run = Run(samples=24).train(2)
    run.accelerator.save_state(folder)
    run.train(1)
    if run.accelerator.process_index == who:
        run.accelerator._checkpoints.disk = Dying(fatal, half=True)
    run.accelerator.save_state(folder, blocking=blocking)
    run.accelerator.wait_for_checkpoint()


def load(folder: str) -> int:
    run = Run(samples=24)
    run.accelerator.load_state(folder)
    run.accelerator.save_state(folder)  # what was left behind is no obstacle
    return run.average.count


# Rank 0 makes and names the folder, rank 1 writes what is its own: the first calls, some in the middle, the last.
@pytest.mark.parametrize(
    ("who", "fatal", "blocking"),
    [
        (0, 2, True), (0, 12, True), (0, 27, True), (1, 1, True), (1, 2, True), (0, 12, False), (1, 2, False),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((0, 2, False), (0, 27, False), (0, 40, False))),
    ],
)  # fmt: skip
def test_a_rank_that_dies_is_named_and_a_checkpoint_is_left(
    tmp_path: Path, who: int, fatal: int, blocking: bool
) -> None:
    folder = tmp_path / "state"
    outcomes = run_ranks(save_and_die, 2, str(folder), who, fatal, blocking, on_failure="collect", timeout=30.0)
    assert outcomes[who].exit_code == -signal.SIGKILL
    other = outcomes[1 - who]
    # By the error of the exchange, or by the guard, whichever sees first that the rank is gone.
    named = f"rank {who}, which died" if other.error_type == "PeerFailure" else f"rank {who} "
    assert named in (other.error_text + other.output).lower(), other.error_text
    assert discovery.verify(folder) == []
    counts = run_ranks(load, 2, str(folder))
    assert counts in ([2, 2], [3, 3])
    assert [path.name for path in tmp_path.iterdir() if "state" in path.name] == ["state"]
