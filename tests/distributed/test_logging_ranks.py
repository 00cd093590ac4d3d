"""Lines from several ranks: who logs, in which order, and what happens when some rank does not."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from lockstep import current
from lockstep.logging import PATIENCE, MultiProcessAdapter, get_logger
from lockstep.testing import run_ranks
from tests.ranks import in_soak

# Start-up of a busy machine, three times over.
SLACK = 0.6


def joined(log: Path | None = None) -> tuple[int, MultiProcessAdapter]:
    """Join the job; lines of all ranks go to one file, as to one terminal."""
    session = current.require()
    logger = get_logger("ranks", log_level="DEBUG")
    for old in list(logger.logger.handlers):  # of the run before: the processes are used again
        logger.logger.removeHandler(old)
        old.close()
    if log is not None:
        handler = logging.FileHandler(log)
        handler.setFormatter(logging.Formatter(f"{session.topology.rank} %(message)s"))
        logger.logger.addHandler(handler)
        session.group.barrier()
    return session.topology.rank, logger


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines()


# ---------------------------------------------------------------- what the ranks run


def speak(log: Path) -> None:
    _, logger = joined(log)
    logger.info("main")
    logger.info("all", main_process_only=False)
    logger.info("main only, though in order", in_order=True)


def print_plainly() -> None:
    _, logger = joined()
    logger.info("hello", main_process_only=False, in_order=True)


def in_turn(log: Path, rounds: int, delays: dict[int, float]) -> float:
    rank, logger = joined(log)
    began = time.monotonic()
    for number in range(rounds):
        time.sleep(delays.get(rank, 0.0))
        logger.info("round %d", number, main_process_only=False, in_order=True)
    return time.monotonic() - began


def only(log: Path, ranks: list[int]) -> float:
    rank, logger = joined(log)
    began = time.monotonic()
    if rank in ranks:
        logger.info("50%% of %s", "it", main_process_only=False, in_order=True)
    return time.monotonic() - began


def some_skip(log: Path, rounds: list[list[int]]) -> list[float]:
    """Rounds of one line of code, each reached by some ranks only; all meet after each."""
    rank, logger = joined(log)
    session = current.require()
    took = []
    for number, ranks in enumerate(rounds):
        began = time.monotonic()
        if rank in ranks:
            logger.info("round %d", number, main_process_only=False, in_order=True)
        took.append(time.monotonic() - began)
        session.group.barrier()
    return took


def late_then_in_time(log: Path) -> list[float]:
    """Rank 0 comes too late, then at once, then late again, but in time for a rank of full patience."""
    rank, logger = joined(log)
    session = current.require()
    took = []
    for number, delay in enumerate((PATIENCE + 0.5, 0.0, 1.2)):
        began = time.monotonic()
        if rank == 0:
            time.sleep(delay)
        logger.info("round %d", number, main_process_only=False, in_order=True)
        took.append(time.monotonic() - began)
        session.group.barrier()
    return took


def other_line_first(log: Path) -> float:
    rank, logger = joined(log)
    if rank == 0:
        for _ in range(3):
            logger.info("alone", main_process_only=False, in_order=True)
        time.sleep(0.5)
    began = time.monotonic()
    logger.info("together", main_process_only=False, in_order=True)
    return time.monotonic() - began


def keys_after(rounds: int) -> tuple[int, int, int]:
    _, logger = joined()
    group = current.require().group

    def log() -> None:
        logger.info("x", main_process_only=False, in_order=True)

    log()
    group.barrier()
    before = group.store.raw.num_keys()
    group.barrier()
    for _ in range(rounds):
        log()
    group.barrier()
    threads = sum(thread.name == "lockstep-log-order" for thread in threading.enumerate())
    return before, group.store.raw.num_keys(), threads


def store_stops(log: Path) -> float:
    """Rank 0, which hosts the store, stands still for a while."""
    rank, logger = joined(log)
    group = current.require().group

    def say(what: str) -> None:
        logger.info(what, main_process_only=False, in_order=True)

    say("before")
    group.store.set(f"pid/{rank}", str(os.getpid()))
    host = int(group.store.get("pid/0"))
    group.barrier()
    took = 0.0
    if rank == 1:
        os.kill(host, signal.SIGSTOP)
        try:
            began = time.monotonic()
            say("meanwhile")
            took = time.monotonic() - began
        finally:
            os.kill(host, signal.SIGCONT)
    group.barrier()
    return took


# ---------------------------------------------------------------- tests


def test_main_or_all(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run_ranks(speak, 3, log)
    assert sorted(lines(log)) == ["0 all", "0 main", "0 main only, though in order", "1 all", "2 all"]


def test_without_a_handler_every_rank_prints_with_its_number() -> None:
    outcomes = run_ranks(print_plainly, 3, on_failure="collect")
    # Torch says something of its own there when no name server answers; with 2.9 gloo does, too.
    theirs = ("[c10d]", "[Gloo]")
    said = [
        [line for line in outcome.output.splitlines() if not any(name in line for name in theirs)]
        for outcome in outcomes
    ]
    assert said == [[f"INFO [rank {rank}] ranks: hello"] for rank in range(3)]


def test_in_order_waits_for_a_late_rank(tmp_path: Path) -> None:
    log = tmp_path / "log"
    took = run_ranks(in_turn, 3, log, 2, {0: 0.5})
    assert lines(log) == [f"{rank} round {number}" for number in range(2) for rank in range(3)]
    assert all(seconds < PATIENCE for seconds in took)


def test_in_order_when_the_middle_is_late(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run_ranks(in_turn, 3, log, 1, {1: 0.5})
    assert lines(log) == ["0 round 0", "1 round 0", "2 round 0"]


def test_rank_0_waits_for_nobody(tmp_path: Path) -> None:
    log = tmp_path / "log"
    took = run_ranks(only, 3, log, [0])
    assert lines(log) == ["0 50% of it"]
    assert took[0] < SLACK


@pytest.mark.parametrize(
    ("ranks", "who", "missing"),
    [([2], 2, "ranks 0, 1"), ([0, 2], 2, "rank 1"), ([1], 1, "rank 0")],
)
def test_those_who_did_not_log_are_named(tmp_path: Path, ranks: list[int], who: int, missing: str) -> None:
    log = tmp_path / "log"
    took = run_ranks(only, 3, log, ranks)
    last = f"{who} 50% of it (in_order: {missing} did not log here as often as this rank; waited "
    assert [line[: len(last)] for line in lines(log)] == [f"{rank} 50% of it" for rank in ranks[:-1]] + [last]
    assert PATIENCE - 0.4 < took[who] < PATIENCE + SLACK


def test_those_who_wait_for_the_same_absent_rank_log_in_order_and_do_not_name_each_other(tmp_path: Path) -> None:
    log = tmp_path / "log"
    took = run_ranks(only, 3, log, [1, 2])
    assert [line.split(";")[0] for line in lines(log)] == [
        f"{rank} 50% of it (in_order: rank 0 did not log here as often as this rank" for rank in (1, 2)
    ]
    assert max(took) < PATIENCE + SLACK


def test_a_rank_that_lags_behind_is_named_each_time_but_waited_for_ever_less(tmp_path: Path) -> None:
    log = tmp_path / "log"
    everyone = [0, 1, 2]
    took = run_ranks(some_skip, 3, log, [everyone, [1, 2], *[everyone] * 6])
    assert lines(log)[:3] == [f"{rank} round 0" for rank in range(3)]
    noted = [line for line in lines(log)[3:] if not line.startswith("0 ")]
    assert len(noted) == 14
    assert all(" (in_order: rank 0 did not log here as often as this rank; waited " in line for line in noted)
    assert took[2][1] > PATIENCE - 0.4
    assert took[2][-1] < SLACK


def test_a_rank_that_was_late_once_is_waited_for_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    took = run_ranks(late_then_in_time, 3, log)
    assert [line for line in lines(log) if "in_order" not in line][-3:] == [f"{rank} round 2" for rank in range(3)]
    assert took[1][0] > PATIENCE - 0.4
    assert took[1][2] > 0.5


def test_a_line_that_rank_0_alone_reached_does_not_count_for_another(tmp_path: Path) -> None:
    log = tmp_path / "log"
    took = run_ranks(other_line_first, 3, log)
    assert lines(log) == ["0 alone"] * 3 + [f"{rank} together" for rank in range(3)]
    assert max(took) < PATIENCE


def test_the_store_does_not_fill_up() -> None:
    for before, after, threads in run_ranks(keys_after, 3, 50):
        assert after == before
        assert threads == 0


def test_a_store_that_stands_still_does_not_hold_a_line_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    took = run_ranks(store_stops, 3, log)
    assert lines(log)[3:] == ["1 meanwhile (in_order: the job's store does not answer, so the order is not certain)"]
    assert took[1] < PATIENCE + SLACK


# ---------------------------------------------------------------- the guide's example, as a script

GUIDE = """
    from lockstep.logging import get_logger

    logger = get_logger(__name__, log_level="DEBUG")
    # log all processes
    logger.debug("thing_to_log", main_process_only=False)
    # log all processes in order
    logger.debug("thing_to_log", main_process_only=False, in_order=True)
"""


def run_script(tmp_path: Path, code: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, *launcher, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_guides_example_in_one_process(tmp_path: Path) -> None:
    done = run_script(tmp_path, GUIDE)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.splitlines() == ["DEBUG __main__: thing_to_log"] * 2


@pytest.mark.parametrize("joined", [True, *in_soak(False)], ids=["joined", "before joining"])
def test_the_guides_example_under_torchrun(tmp_path: Path, joined: bool) -> None:
    join = "    from lockstep import current\n\n    current.require()\n" if joined else ""
    done = run_script(tmp_path, join + GUIDE, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "thing_to_log" in line]
    ranks = [re.match(r"DEBUG \[rank (\d)\] __main__: thing_to_log", line) for line in lines]
    assert all(ranks), lines
    assert sorted(match[1] for match in ranks if match) == ["0", "0", "1", "1"]
    assert not any("in_order" in line for line in lines)  # before joining, the launcher's store serves
