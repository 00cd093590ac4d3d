"""Disks that are full and ranks that die in the middle of a save: what is told, and what is still there."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.checkpoint import find
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
    assert find.verify(folder / "checkpoint_0") == []
    ballast.unlink()
    run.train(1)
    save()
    assert len([path for path in folder.iterdir() if find.verify(path) == []]) == 2


def save_and_die(folder: str, who: int, fatal: int) -> None:
    run = Run(samples=24).train(2)
    run.accelerator.save_state(folder)
    run.train(1)
    if run.accelerator.process_index == who:
        run.accelerator._checkpoints.disk = Dying(fatal, half=True, swaps=True)
    run.accelerator.save_state(folder)


def load(folder: str) -> int:
    run = Run(samples=24)
    run.accelerator.load_state(folder)
    run.accelerator.save_state(folder)  # what was left behind is no obstacle
    return run.average.count


# Rank 0 makes and names the folder, rank 1 writes what is its own: the first calls, some in the middle, the last.
@pytest.mark.parametrize(("who", "fatal"), [(0, 2), (0, 12), (0, 27), (1, 1), (1, 2)])
def test_a_rank_that_dies_is_named_and_a_checkpoint_is_left(tmp_path: Path, who: int, fatal: int) -> None:
    folder = tmp_path / "state"
    outcomes = run_ranks(save_and_die, 2, str(folder), who, fatal, on_failure="collect", timeout=30.0)
    assert outcomes[who].exit_code == -signal.SIGKILL
    other = outcomes[1 - who]
    # By the error of the exchange, or by the guard, whichever sees first that the rank is gone.
    named = f"rank {who}, which died" if other.error_type == "PeerFailure" else f"rank {who} "
    assert named in (other.error_text + other.output).lower()
    assert find.verify(folder) == []
    counts = run_ranks(load, 2, str(folder))
    assert counts in ([2, 2], [3, 3])
    assert [path.name for path in tmp_path.iterdir() if "state" in path.name] == ["state"]
