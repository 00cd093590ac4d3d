"""What a rank that has died was doing, read off its black box."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.guard.rank_location import last_steps
from tests.unit.guard.boxes import BACKWARD, GATHER, NOW, box

DONE = " The last collective it completed is gather #1 at train.py:30."


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {"calls": [GATHER, BACKWARD], "waits": 1.0},
            f"It was in backward #2 at train.py:20, before its first step.{DONE}",
        ),
        (
            {"calls": [GATHER], "phase": "data", "phase_site": "train.py:9", "step": 7},
            f"It was in the data loader at train.py:9, after step 7.{DONE}",
        ),
        (
            {"calls": [GATHER], "phase": "backward, not averaging", "step": 7},
            f"It was in backward, not averaging, after step 7.{DONE}",
        ),
        (
            {"calls": [GATHER], "step": 7, "stack": ("/usr/lib/python3.11/x.py:1 in f", "train.py:3 in evaluate")},
            f"It was in evaluate() at train.py:3, after step 7.{DONE}",
        ),
        (
            {"calls": [GATHER], "step": 7},
            "It was in the script's own code after gather #1 at train.py:30, after step 7.",
        ),
        ({"calls": []}, "It was in the script's own code before its first collective, before its first step."),
    ],
)
def test_what_it_was_doing(state: dict[str, Any], text: str) -> None:
    assert last_steps(box(1, alive=False, now=NOW, **state)) == text
