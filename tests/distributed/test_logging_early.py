"""``in_order`` before there is an Accelerator: ordered in the launcher's store, and never a hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.logging import PATIENCE
from tests.ranks import in_soak

SCRIPT = """
import os, sys, time
from lockstep.logging import get_logger

rank = int(os.environ["RANK"])
if sys.argv[1] == "own-group":
    import torch.distributed as dist
    dist.init_process_group("gloo")
logger = get_logger(__name__, log_level="DEBUG")
time.sleep(0.3 * (2 - rank))
began = time.monotonic()
if sys.argv[1] != "some" or rank:
    for number in range(int(sys.argv[2])):
        logger.debug("thing_to_log %d", number, main_process_only=False, in_order=True)
print("took", time.monotonic() - began)
"""
LAUNCHERS = {
    "lockstep": ["lockstep", "launch", "--cpu", "--num_processes", "3"],
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=3"],
}


def run(
    folder: Path, command: list[str], how: str, lines: int = 2, **environ: str
) -> tuple[list[tuple[int, int]], str]:
    """The ranks and numbers of the lines, in the order of the screen; and the screen."""
    script = folder / "early.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *command, str(script), how, str(lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
        env={**os.environ, "LOCKSTEP_RUN_DIR": str(folder / "run"), **environ},
    )
    assert done.returncode == 0, done.stdout
    found = re.findall(r"\[rank (\d)\] __main__: thing_to_log (\d)", done.stdout)
    return [(int(rank), int(number)) for rank, number in found], done.stdout


@pytest.mark.parametrize("job", ["torchrun all", *in_soak("lockstep all", "torchrun own-group")])
def test_lines_appear_in_the_order_of_the_ranks(tmp_path: Path, job: str) -> None:
    launcher, how = job.split()
    lines, screen = run(tmp_path, ["-m", *LAUNCHERS[launcher]], how)
    for number in range(2):
        assert [rank for rank, of in lines if of == number] == [0, 1, 2], screen
    assert "in_order" not in screen


def test_a_rank_that_does_not_log_is_not_waited_for_long(tmp_path: Path) -> None:
    lines, screen = run(tmp_path, ["-m", *LAUNCHERS["lockstep"]], "some")
    assert sorted(lines) == [(rank, number) for rank in (1, 2) for number in range(2)], screen
    assert "in_order: rank 0 did not log here as often as this rank" in screen
    took = [float(text) for text in re.findall(r"took ([\d.]+)", screen)]
    assert max(took) < 3 * 2 * PATIENCE, screen


def test_without_a_store_it_logs_at_once_and_says_so(tmp_path: Path) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    lines, screen = run(tmp_path, [], "all", MASTER_ADDR="127.0.0.1", MASTER_PORT="1", **place)
    assert lines == [(1, 0), (1, 1)]
    assert screen.count("no Accelerator yet, and no launcher with a store") == 1


def test_a_store_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    lines, screen = run(tmp_path, [], "all", 6, **agent, **place)
    assert lines == [(1, number) for number in range(6)]
    assert "so the order is not certain" in screen
    # Later lines do not wait for a store that did not answer for the first, and neither does the exit.
    took = float(re.findall(r"took ([\d.]+)", screen)[0])
    assert took < 5 * PATIENCE, screen
