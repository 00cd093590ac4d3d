"""A rank that is slow in every step, for real: named with the phase; equal ranks are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.jobs import Job, Result
from tests.ranks import in_soak


def slow(phase: str) -> Job:
    return Job(scenario=phase, script="slow.py")


@pytest.mark.parametrize("job", [slow("backward"), *in_soak(slow("forward"), slow("data"))], ids=str)
def test_the_slow_rank_and_its_phase_are_named(ended: Callable[[Job], Result], job: Job) -> None:
    done = ended(job)
    assert done.code == 0, done
    assert "Rank 1 (" in done.words, done
    assert f"most of it in {job.scenario}" in done.words, done
    assert done.words.count("slower than the other ranks") == 1, done


@pytest.mark.parametrize("job", in_soak(Job(scenario="slow", script="data_bound.py")), ids=str)
def test_a_rank_whose_workers_are_slow_is_named(ended: Callable[[Job], Result], job: Job) -> None:
    done = ended(job)
    assert done.code == 0, done
    assert "Rank 1 (" in done.words, done
    assert "most of it in data" in done.words, done
    assert done.words.count("slower than the other ranks") == 1, done


@pytest.mark.parametrize("job", [slow("none"), *in_soak(Job(scenario="equal", script="data_bound.py"))], ids=str)
def test_equal_ranks_are_left_alone(ended: Callable[[Job], Result], job: Job) -> None:
    done = ended(job)
    assert done.code == 0, done
    assert "slower" not in done.words, done
