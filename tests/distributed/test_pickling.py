"""Accelerators and states that are pickled: found again in their process, and only a memory elsewhere."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep import Accelerator, AcceleratorState, GradientState, PartialState
from lockstep.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("alone")

ELSEWHERE = """
import os, pickle, sys
import lockstep
os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
accelerator, partial, state = pickle.load(open(sys.argv[1], "rb"))
assert type(accelerator) is lockstep.Accelerator and type(partial) is lockstep.PartialState
for view in (accelerator, partial, state, accelerator.state):
    assert (view.process_index, view.num_processes, str(view.device), view.is_main_process) == (0, 1, "cpu", True)
assert (state.mixed_precision, accelerator.state.mixed_precision) == ("no", "no")
assert not partial.initialized and not partial.debug
repr(accelerator), repr(partial)
for call in (accelerator.wait_for_everyone, lambda: accelerator.gather(1), partial.wait_for_everyone):
    try:
        call()
    except lockstep.UsageError as error:
        assert "pickled in rank 0 of 1 and unpickled in a process that is not this rank" in str(error), error
    else:
        raise AssertionError(call)
for name in ("gradient_accumulation_steps", "mixed_precision", "nothing"):
    assert not hasattr(accelerator, name)
assert "pickled in rank 0 of 1" in str(pickle.loads(pickle.dumps(accelerator))._session.group.away)
assert lockstep.current.peek() is None
"""


def test_in_its_own_process_it_is_the_same() -> None:
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    for accelerator in (first, second):
        assert pickle.loads(pickle.dumps(accelerator)) is accelerator
        assert copy.deepcopy({"a": accelerator})["a"] is accelerator
    for view in (PartialState(), AcceleratorState()):
        again = pickle.loads(pickle.dumps(view))
        assert type(again) is type(view)
        assert again.__dict__ == view.__dict__
    assert isinstance(pickle.loads(pickle.dumps(GradientState())), GradientState)


def test_the_same_bytes_each_time() -> None:
    """What goes by a hash of them, as caches of data sets do, is not made anew in every run."""
    text = "import pickle, lockstep; print(pickle.dumps(lockstep.Accelerator(cpu=True)).hex())"
    runs = [subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=60, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout


def test_elsewhere_it_knows_its_place_and_joins_no_job(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_bytes(pickle.dumps((Accelerator(cpu=True), PartialState(), AcceleratorState())))
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, kept], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def place(accelerator: Any) -> tuple[int, int, bool]:
    return accelerator.process_index, accelerator.num_processes, accelerator.is_main_process


def handed_to_a_child() -> tuple[Any, Any]:
    accelerator = Accelerator(cpu=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        told = pool.apply(place, (accelerator,))
    accelerator.wait_for_everyone()  # the job goes on
    return told, place(accelerator)


def test_a_child_of_a_rank_is_not_taken_for_the_rank() -> None:
    for rank, (child, own) in enumerate(run_ranks(handed_to_a_child, 2)):
        assert child == own == (rank, 2, rank == 0)
