"""torchrun's own last block shows why a rank ended."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.faults.jobs import Job, Result, marks
from tests.ranks import in_soak

AT = marks("summary.py")


def line(mark: str) -> str:
    return f'summary.py", line {AT[mark].rpartition(":")[2]}, in '


# A rank that has failed may be asked to end by torchrun before it has.
SHOWS = {
    "raises": f"exitcode : (1|-15) .* error_file: /.*{line('raises')}end .* ValueError: sample 11 is broken",
    "exits": f"exitcode : 3 .* error_file: /.*{line('exits')}end .* SystemExit: 3",
    "guard": "exitcode : 86 .* error_file: /.* lockstep guard: the ranks are out of step .* "
    rf"rank 0 waits in torch's barrier #\d+ at \S*{AT['barrier']}",
    "record": f"exitcode : (1|-15) .* error_file: /.*{line('raises')}end .* ValueError: sample 11 is broken",
}


@pytest.mark.parametrize("how", ["exits", "guard", *in_soak("raises", "record")])
def test_it_shows_the_cause(ended: Callable[[Job], Result], how: str) -> None:
    result = ended(Job(scenario=how, script="summary.py", launcher="torchrun"))
    block = result.words.partition("summary.py FAILED")[2]
    root = block.partition("Root Cause (first observed failure):")[2]
    rank = r"[01]" if how == "guard" else "1"
    assert re.search(f"rank : {rank} .*{SHOWS[how]}", root), result
    assert "<N/A>" not in root, result
