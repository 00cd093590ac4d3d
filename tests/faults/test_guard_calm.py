"""Ranks that only look as if they had fallen out of step: the guard says nothing, and never stops them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.faults.jobs import Job, Result

# All in one job: each part has ranks wait for longer than the guard needs to make up its mind.
CALM = Job(script="calm.py")
PARTS = [
    "slow_first_batch",
    "uneven_steps",
    "join_uneven_inputs",
    "log_in_order",
    "evaluate_alone",
    "handle_for_later",
    "caught_mismatch",
    "stop_signal",
    "debugger",
]


def check_calm(result: Result, part: str) -> None:
    assert f"done: {part}\n" in result.text, result
    assert result.code == 0, result
    assert "lockstep guard" not in result.text, result
    assert not (result.run / "diagnosis.txt").exists()


@pytest.mark.parametrize(("part", "job"), [(part, CALM) for part in PARTS], ids=PARTS)
def test_it_is_no_error(ended: Callable[[Job], Result], part: str, job: Job) -> None:
    result = ended(job)
    check_calm(result, part)
    if part == "debugger":
        if found := re.search("no debugger here: .*", result.text):
            pytest.skip(found[0])
        assert "held by a debugger" in result.text


@pytest.mark.soak
@pytest.mark.parametrize(
    "job",
    [
        Job(script="calm.py", ranks=ranks, launcher=launcher)
        for ranks in (2, 4)
        for launcher in ("lockstep", "torchrun")
    ],
    ids=str,
)
def test_on_more_ranks_and_by_torchrun(ended: Callable[[Job], Result], job: Job) -> None:
    for part in PARTS:
        check_calm(ended(job), part)


# Where other tests want the processor it may take longer than the 30 s after which a wait is reported, and rightly so.
COMPILES = Job(
    scenario="compile_on_one_rank", script="calm.py", limit=180.0, environ=(("LOCKSTEP_STALL_SECONDS", "120"),)
)


@pytest.mark.soak
@pytest.mark.parametrize("job", [COMPILES], ids=str)
def test_a_compiler_on_one_rank_is_no_error(ended: Callable[[Job], Result], job: Job) -> None:
    result = ended(job)
    check_calm(result, job.scenario)
    assert "compiled in" in result.text


ALONE = Job(scenario="alone for a while", seconds=60.0, limit=180.0)
PATIENT = Job(scenario="alone for a while", seconds=60.0, limit=180.0, environ=(("LOCKSTEP_STALL_SECONDS", "90"),))


@pytest.mark.soak
@pytest.mark.parametrize("job", [ALONE], ids=str)
def test_a_minute_of_evaluation_on_one_rank_is_told_and_left_alone(ended: Callable[[Job], Result], job: Job) -> None:
    result = ended(job)
    assert result.code == 0, result
    assert "all done" in result.text
    assert 1 <= result.text.count("lockstep guard: ranks have been waiting") <= 2  # after 30 s, and again after 60
    assert "Job continues" in result.words
    assert "stopped" not in result.text
    assert "Rank 0 works alone" in result.words or "time.sleep" in result.words


@pytest.mark.soak
@pytest.mark.parametrize("job", [PATIENT], ids=str)
def test_whoever_raises_the_limit_is_told_nothing(ended: Callable[[Job], Result], job: Job) -> None:
    result = ended(job)
    assert result.code == 0, result
    assert "all done" in result.text
    assert "lockstep guard" not in result.text
