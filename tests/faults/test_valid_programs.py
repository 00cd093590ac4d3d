"""Programs in which ranks differ and none is wrong: nothing is reported, nothing is stopped, and the weights agree."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.jobs import Job, Result
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
