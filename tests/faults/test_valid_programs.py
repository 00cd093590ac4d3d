"""Programs in which ranks differ and none is wrong: nothing is reported, nothing is stopped, and the weights agree."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.jobs import Job, Result, marks
from tests.faults.test_guard_calm import check_calm

TREE = ast.parse(Path(__file__).with_name("valid.py").read_text(encoding="utf-8"))
HELPERS = ("loader", "shared_folder")
PROGRAMS = [node.name for node in TREE.body if isinstance(node, ast.FunctionDef) and node.name not in HELPERS]
VALID = Job(script="valid.py")


@pytest.mark.parametrize(("program", "job"), [(program, VALID) for program in PROGRAMS], ids=PROGRAMS)
def test_it_runs_to_its_end(ended: Callable[[Job], Result], program: str, job: Job) -> None:
    check_calm(ended(job), program)


@pytest.mark.soak
@pytest.mark.parametrize(
    "job",
    [
        Job(script="valid.py", ranks=ranks, launcher=launcher)
        for ranks in (2, 4)
        for launcher in ("lockstep", "torchrun")
    ],
    ids=str,
)
def test_on_more_ranks_and_by_torchrun(ended: Callable[[Job], Result], job: Job) -> None:
    for program in PROGRAMS:
        check_calm(ended(job), program)


SKIPS = Job(script="skipping.py", scenario="forward")


@pytest.mark.parametrize("job", [SKIPS], ids=str)
def test_a_rank_that_leaves_a_backward_out_is_warned_of_once_while_the_job_runs(
    ended: Callable[[Job], Result], job: Job
) -> None:
    result = ended(job)
    assert result.code == 0, result
    assert "done: skipping" in result.text, result
    warning = (
        f"rank 1 called the model at \\S*{marks('skipping.py')['forward']} without a backward \\(after 5 updates\\)"
    )
    assert len(re.findall(warning, result.text)) == 1, result
    assert "reduces the gradients of batch 7 with those of batch 6 on rank 0" in result.text, result
