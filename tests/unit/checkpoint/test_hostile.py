"""Whatever is in a folder: one error that names the file, at once, in little memory, and nothing has changed."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.checkpoint import restoring
from lockstep.errors import CheckpointError
from tests.ranks import in_soak
from tests.unit.checkpoint.hostile import KINDS, VARIANTS
from tests.unit.checkpoint.runs import Run

pytestmark = pytest.mark.usefixtures("alone")
BYTES, SECONDS = 200e6, 5
"""What a refusal may take."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the middle of an accumulation window: there are gradients in it."""
    place = tmp_path_factory.mktemp("saved") / "state"
    Run().train(4).accelerator.save_state(place)
    assert (place / "gradients_0.bin").exists()
    return place


@pytest.fixture(scope="module")
def run() -> Run:
    """Another run, further on, into which all of them are loaded."""
    return Run().train(7)


def everything(run: Run) -> dict[str, bytes]:
    """All that a load could change, to the bit."""
    states: dict[str, Any] = {
        **{f"model {name}": value for name, value in run.model.state_dict().items()},
        **{f"gradient {name}": value.grad for name, value in run.model.named_parameters()},
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "loader": run.loader.state_dict(),
        "object": run.average.state_dict(),
        "window": run.accelerator._state.accumulation.state_dict(),
        "updates": run.accelerator._state.updates,
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    return {name: bits(value) for name, value in states.items()}


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {name: bits(item) for name, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@contextmanager
def limits() -> Iterator[Callable[[], int]]:
    """Ends what waits for ever or wants all memory; gives what the peak of memory has grown by."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("it took too long")

    Path("/proc/self/clear_refs").write_text("5")
    before, (soft, hard) = memory("VmRSS"), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + 3 * 2**30, hard))
    old = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, 3 * SECONDS)  # three times the bar, as the machine may be busy
    try:
        yield lambda: memory("VmHWM") - before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", [*(name for name in KINDS if name not in VARIANTS), *in_soak(*sorted(VARIANTS))])
def test_a_hostile_folder_changes_nothing(
    tmp_path: Path, saved: Path, run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    shutil.copytree(saved, folder)
    try:
        blamed = KINDS[name](folder)
    except PermissionError:
        pytest.skip("only root may make devices")
    monkeypatch.chdir(tmp_path)
    before = everything(run)
    with limits() as grown:
        with pytest.raises(CheckpointError) as caught:
            run.accelerator.load_state(folder)
        more = grown()
    message = str(caught.value)
    assert blamed in message
    assert str(folder) in message
    assert len(message) < 2000
    assert more < BYTES
    assert everything(run) == before
    assert not os.path.exists("lockstep-was-fooled")


def test_there_are_many_kinds() -> None:
    assert len(KINDS) - len(VARIANTS) > 50


@pytest.mark.parametrize("cheap", [True, False])
def test_an_object_that_raises_has_the_rest_taken_back(
    saved: Path, run: Run, cheap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights too, unless they are many and nothing told of it before; then the error says so."""
    monkeypatch.setattr(run.average, "load_state_dict", lambda state: 1 / 0)
    if not cheap:
        monkeypatch.setattr(restoring, "_CHEAP", 0)
    before = everything(run)
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl.*ZeroDivisionError") as caught:
        run.accelerator.load_state(saved)
    after = everything(run)
    assert ("nothing was changed" in str(caught.value)) == cheap
    assert ("weights of the checkpoint by now" in str(caught.value)) != cheap
    same = {name for name in before if before[name] == after[name]}
    assert {name for name in before if not name.startswith("model")} <= same
    assert (same == before.keys()) == cheap
