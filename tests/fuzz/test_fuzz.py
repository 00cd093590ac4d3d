"""Random valid programs run to their end, without a word from the guard, and with the numbers of one process.

A failure names the program: ``python -m tests.fuzz.hunt SEED 1`` runs it alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.durations import Note
from tests.fuzz.jobs import Job, Result
from tests.fuzz.program import draw
from tests.fuzz.reference import close, differences

JOBS = [
    Job(seeds=tuple(range(0, 25)), ranks=2, launcher="lockstep"),
    Job(seeds=tuple(range(25, 40)), ranks=2, launcher="torchrun"),
    Job(seeds=tuple(range(40, 50)), ranks=3, launcher="torchrun"),
    Job(seeds=tuple(range(50, 60)), ranks=4, launcher="lockstep"),
]
SHAPES = [(2, "lockstep"), (1, "lockstep"), (3, "lockstep"), (2, "torchrun"), (4, "torchrun")]
"""Ranks and launchers of the long run, in turn."""
LONG = [
    Job(seeds=tuple(range(10 * number, 10 * number + 10)), ranks=ranks, launcher=launcher)
    for number in range(6, 206)
    for ranks, launcher in [SHAPES[number % len(SHAPES)]]
]
WARNING = re.compile(r"^.*(?:WARNING|ERROR|Warning:|lockstep guard).*$", re.MULTILINE)
ALLOWED = [
    "The learning rate schedule is ",  # schedules here are longer than the few steps that are made
    "have been waiting for",  # a wait that is real, on a machine that is busy
]


def check(job: Job, result: Result) -> None:
    """Every program of the job has ended as it must."""
    assert result.code == 0, result
    assert list(result.programs) == list(job.seeds), result
    unexpected = [line for line in WARNING.findall(result.text) if not any(words in line for words in ALLOWED)]
    assert not unexpected, "\n".join([*unexpected, str(result)])
    wrong = {str(draw(seed)): differences(draw(seed), seen) for seed, seen in result.programs.items()}
    assert not any(wrong.values()), {program: lines for program, lines in wrong.items() if lines}


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_valid_programs_run_with_the_numbers_of_one_process(ended: Callable[[Job], Result], job: Job) -> None:
    check(job, ended(job))


@pytest.mark.parametrize("job", JOBS[1:2], ids=str)
def test_accelerate_gives_the_same_where_it_is_right(ended: Callable[[Job], Result], job: Job) -> None:
    """The same programs under Accelerate: they are valid there, and the reference is right about them."""
    seeds = tuple(seed for seed in job.seeds if draw(seed).accelerate_agrees())
    theirs = ended(Job(seeds=seeds, ranks=job.ranks, library="accelerate"))
    assert theirs.code == 0, theirs
    ours = ended(job)
    for seed, ranks in theirs.programs.items():
        assert differences(draw(seed), ranks) == [], str(draw(seed))
        if draw(seed).sampler not in ("shuffle", "seedable"):  # each has its own way to put generators in step
            for their_rank, our_rank in zip(ranks, ours.programs[seed], strict=True):
                assert their_rank["drawn"] == our_rank["drawn"], str(draw(seed))
                assert close(their_rank["parameters"], our_rank["parameters"], 5e-3), str(draw(seed))


@pytest.mark.soak_long
@pytest.mark.parametrize("job", LONG, ids=str)
def test_many_valid_programs(ended: Callable[[Job], Result], job: Job, note: Note) -> None:
    result = ended(job)
    check(job, result)
    seconds = sum(ranks[0]["seconds"] for ranks in result.programs.values())
    note(f"fuzz: {job}: {len(result.programs)} programs in {seconds:.1f} s")
