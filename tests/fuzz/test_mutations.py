"""Valid programs with one mistake: the rank and the line are named, and soon; or the mistake does no harm."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from lockstep.testing import run_ranks
from tests.durations import Note
from tests.fuzz.mutations import KINDS, LINES, marks, mutate, train

AT = marks()
LIMIT = 45.0
"""Seconds for a program. What hangs so long is not found."""
REACHES = 15.0
"""Seconds to the end: three times the bar, for a machine that has more to do."""


def outcome_of(seed: int, **choices: Any) -> str:
    """``named`` or ``harmless``; anything else is a failure, with what was seen."""
    mutation = mutate(seed, **choices)
    outcomes = run_ranks(train, mutation.ranks, seed, timeout=LIMIT, on_failure="collect", **choices)
    ended = time.time()
    text = "".join(f"{outcome.output}\n{outcome.error_text}\n" for outcome in outcomes)
    seen = f"{mutation}\n{text}"
    if any(outcome.error_type == "TimedOut" for outcome in outcomes):
        return f"hangs: {seen}"
    if all(outcome.ok for outcome in outcomes):
        weights = [outcome.value for outcome in outcomes]
        return "harmless" if all(each == weights[0] for each in weights) else f"weights differ: {seen}"
    words = " ".join(text.split())
    line = AT[LINES[mutation.kind]]
    # The forward after the first update exchanges DDP's buckets: the others may wait there already.
    lines = [line, AT["forward"]] if LINES[mutation.kind] == "backward" else [line]
    if not re.search(rf"(?:rank|process) {mutation.rank}\b", words, re.IGNORECASE):
        return f"rank {mutation.rank} is not named: {seen}"
    # Torch's own error for a rank that aborts has the line in its traceback.
    lines += [line.replace(":", '", line ')]
    if not any(re.search(rf"\b{re.escape(each)}\b", words) for each in lines):
        return f"{line} is not named: {seen}"
    since = ended - max(float(moment) for moment in re.findall(r"fault at ([\d.]+)", text))
    return "named" if since < REACHES else f"took {since:.1f} s: {seen}"


IN_BRIEF = ("left out", "shape", "dtype", "skipped backward", "swallowed error", "skipped step", "fewer batches")


@pytest.mark.parametrize("seed", [KINDS.index(kind) for kind in IN_BRIEF], ids=IN_BRIEF)
def test_a_mistake_is_named(seed: int) -> None:
    outcome = outcome_of(seed, accumulation=1)  # what is left out of a longer window may do no harm
    assert outcome == "named", outcome


@pytest.mark.soak_long
@pytest.mark.parametrize("kind", KINDS)
def test_many_mistakes_are_named(kind: str, note: Note) -> None:
    seeds = range(len(KINDS) + KINDS.index(kind), 300 + len(KINDS), len(KINDS))
    outcomes = [outcome_of(seed) for seed in seeds]
    count = {name: outcomes.count(name) for name in ("named", "harmless")}
    note(f"mutations: {kind}: {len(seeds)} programs, {count['named']} named, {count['harmless']} without harm")
    if failed := [outcome for outcome in outcomes if outcome not in count]:
        pytest.fail("\n\n".join(failed), pytrace=False)
