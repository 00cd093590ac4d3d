"""More ranks than cores: everything waits for everything, for seconds at times, and nothing is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import median

import pytest

from tests.durations import Note
from tests.faults.jobs import Job, Result

# Each rank imports torch for itself: on two cores that alone takes half a minute for 16.
JOBS = [
    Job(script="many_ranks.py", ranks=ranks, launcher=launcher, limit=600.0)
    for ranks, launcher in ((8, "lockstep"), (16, "lockstep"), (8, "torchrun"))
]


@pytest.mark.soak
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_crowded_machine_is_no_reason_for_an_alarm(ended: Callable[[Job], Result], job: Job, note: Note) -> None:
    result = ended(job)
    assert result.code == 0, result
    assert "all done" in result.text, result
    used = [tuple(map(int, found)) for found in re.findall(r"memory: (\d+) (\d+) (\d+)", result.text)]
    assert len(used) == job.ranks, result
    for name, values in zip(("PSS", "USS", "RSS"), zip(*used, strict=True), strict=True):
        megabytes = [value / 1024 for value in values]
        note(f"{job}: {name} of a rank {median(megabytes):.0f} MB, at most {max(megabytes):.0f} MB")
    assert "lockstep guard" not in result.text, result
    assert "lockstep: " not in result.text, result  # while ranks join
    assert "WARNING" not in result.text, result
    assert not (result.run / "diagnosis.txt").exists()
