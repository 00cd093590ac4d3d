"""Random valid programs run to their end, without a word from the guard, and with the numbers of one process.

A failure names the program: ``python -m tests.fuzz.hunt SEED 1`` runs it alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest

from tests.durations import Note
from tests.fuzz.jobs import Job, Result
from tests.fuzz.program import COLLECTIVES, ITERATIONS, MAIN_ONLY, MODELS, SAMPLERS, SHARED, draw
from tests.fuzz.reference import close, differences

JOBS = [
    Job(seeds=tuple(range(0, 30)), ranks=2, launcher="lockstep"),
    Job(seeds=tuple(range(30, 48)), ranks=2, launcher="torchrun"),
    Job(seeds=tuple(range(48, 54)), ranks=3, launcher="torchrun"),
    Job(seeds=tuple(range(54, 60)), ranks=4, launcher="lockstep"),
]
SHAPES = [*[(2, "lockstep")] * 5, *[(1, "lockstep")] * 2, (2, "torchrun"), (3, "lockstep"), (4, "torchrun")]
"""Ranks and launchers of the long run, in turn: mostly those that start soon."""
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
    if result.code or list(result.programs) != list(job.seeds):
        pytest.fail(str(result), pytrace=False)
    unexpected = [line for line in WARNING.findall(result.text) if not any(words in line for words in ALLOWED)]
    assert not unexpected
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
    ours = ended(job)
    for result in (theirs, ours):
        if result.code:
            pytest.fail(str(result), pytrace=False)
    for seed, ranks in theirs.programs.items():
        assert differences(draw(seed), ranks) == [], str(draw(seed))
        if draw(seed).sampler not in ("shuffle", "seedable"):  # each has its own way to put generators in step
            for their_rank, our_rank in zip(ranks, ours.programs[seed], strict=True):
                assert their_rank["drawn"] == our_rank["drawn"], str(draw(seed))
                assert close(their_rank["parameters"], our_rank["parameters"], 5e-3), str(draw(seed))


def test_the_reference_sees_what_is_wrong(ended: Callable[[Job], Result]) -> None:
    """One number changed, in what real ranks saw."""
    result = ended(JOBS[-1])
    seed = next(seed for seed in result.programs if draw(seed).iteration == "plain" and draw(seed).order_is_known)
    for spoil in (
        lambda seen: seen["parameters"].__setitem__(0, seen["parameters"][0] + 0.01),
        lambda seen: seen["steps"][-1].__setitem__(1, seen["steps"][-1][1] + 0.01),
        lambda seen: seen["steps"].pop(),
        lambda seen: seen["drawn"][0][0].reverse() or seen["drawn"][0][0].append(0),
        lambda seen: seen["rates"].__setitem__(-1, 1.0),
        lambda seen: seen["extras"].append(["gather", []]),
    ):
        ranks = copy.deepcopy(result.programs[seed])
        assert differences(draw(seed), ranks) == []
        spoil(ranks[-1])
        assert differences(draw(seed), ranks)


def test_every_choice_is_drawn() -> None:
    programs = [draw(seed) for job in JOBS + LONG for seed in job.seeds]
    assert len(programs) == 2060
    assert {program.model for program in programs} == set(MODELS)
    assert {program.iteration for program in programs} == set(ITERATIONS)
    assert {program.sampler for program in programs} == set(SAMPLERS)
    assert {name for program in programs for name, _ in program.extras} == {*COLLECTIVES, *MAIN_ONLY, *SHARED}
    for name in ("stream", "join", "split_batches", "dispatch_batches", "persistent_workers", "resume", "skip"):
        assert len({getattr(program, name) for program in programs}) > 1, name


@pytest.mark.soak_long
@pytest.mark.parametrize("job", LONG, ids=str)
def test_many_valid_programs(ended: Callable[[Job], Result], job: Job, note: Note) -> None:
    result = ended(job)
    check(job, result)
    seconds = sum(ranks[0]["seconds"] for ranks in result.programs.values())
    note(f"fuzz: {job}: {len(result.programs)} programs in {seconds:.1f} s")
