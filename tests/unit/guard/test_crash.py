"""A crash in native code: read from what faulthandler wrote, and set beside what the other ranks did."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.guard.crash import different_calls, read_crash, with_crash
from lockstep.guard.dead_peers import advise_on_dead
from lockstep.rundir.constants import stack_file
from tests.unit.guard.boxes import BACKWARD, GATHER, box

ALL_REDUCE = (
    "/v/site-packages/torch/distributed/distributed_c10d.py:3252 in all_reduce",
    "/me/train.py:13 in <module>",
)


@pytest.mark.parametrize(("signal", "kind"), [("SIGABRT", "Aborted"), ("SIGSEGV", "Segmentation fault")])
def test_what_faulthandler_writes_is_read(tmp_path: Path, signal: str, kind: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import faulthandler, os, signal, sys, threading\n"
        f"file = open({str(tmp_path / stack_file(3))!r}, 'w')\n"
        "faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)\n"
        "faulthandler.enable(file)\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        f"def step():\n    os.kill(os.getpid(), signal.{signal})\nstep()\n"
    )
    subprocess.run([sys.executable, str(script)], timeout=60, check=False, capture_output=True)
    crash = read_crash(tmp_path, 3)
    assert crash is not None
    assert crash.kind == kind
    assert [(frame.function, frame.line) for frame in crash.stack] == [("<module>", 9), ("step", 8)]
    assert with_crash(box(3), tmp_path).stack[0].endswith("train.py:8 in step")
    assert read_crash(tmp_path, 2) is None


def test_an_abort_inside_a_collective_is_explained_by_another_rank_in_another_one() -> None:
    dead = box(0, [BACKWARD], alive=False, crash="Aborted", stack=ALL_REDUCE, world=3)
    strayed = box(1, [BACKWARD, BACKWARD], waits=1, world=3)
    follows = box(2, [BACKWARD], alive=False, crash="Aborted", stack=ALL_REDUCE, world=3)
    advice = different_calls(dead, [dead, strayed, follows])
    assert advice is not None
    assert advice.details == "At that moment rank 1 was in backward #2 at train.py:20."
    assert "different collective calls" in advice.cause


@pytest.mark.parametrize(
    "other",
    [
        box(1, [BACKWARD]),  # in its own code
        box(1, [BACKWARD], alive=False, crash="Aborted", stack=ALL_REDUCE),  # in the same call
        box(1, [BACKWARD, GATHER], waits=1, generation=1),  # in another process group
    ],
)
def test_an_abort_without_another_call_is_not(other: object) -> None:
    dead = box(0, [BACKWARD], alive=False, crash="Aborted", stack=ALL_REDUCE)
    assert different_calls(dead, [dead, other]) is None  # type: ignore[list-item]


def test_a_crash_outside_of_collectives_or_of_another_kind_is_not() -> None:
    dead = box(0, [BACKWARD], alive=False, crash="Aborted", stack=("/me/train.py:13 in <module>",))
    other = box(1, [BACKWARD, GATHER], waits=1)
    assert different_calls(dead, [dead, other]) is None
    segfault = replace(dead, crash="Segmentation fault", stack=ALL_REDUCE)
    assert different_calls(segfault, [dead, other]) is None
    told = advise_on_dead([segfault], None)
    assert "crashed in native code (Segmentation fault). It was in torch's all_reduce at /me/train.py:13" in told.lead
    assert told.fix == ""
