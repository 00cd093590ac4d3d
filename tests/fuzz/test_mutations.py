"""Valid programs with one mistake: the rank and the line are named, and soon; or the mistake does no harm."""

from __future__ import annotations

import re
import time

import pytest

from lockstep.testing import run_ranks
from tests.durations import Note
from tests.fuzz.mutations import KINDS, LINES, Mutation, marks, mutate, train

AT = marks()
LIMIT = 45.0
"""Seconds for a program. What hangs so long is not found."""
REACHES = 15.0
"""Seconds to the end: three times the bar, for a machine that has more to do."""


def outcome_of(mutation: Mutation) -> str:
    """``named`` or ``harmless``; anything else is a failure, with what was seen."""
    outcomes = run_ranks(train, mutation.ranks, mutation.seed, timeout=LIMIT, on_failure="collect")
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
    if not re.search(rf"(?:rank|process) {mutation.rank}\b", words, re.IGNORECASE):
        return f"rank {mutation.rank} is not named: {seen}"
    if not re.search(rf"\b{re.escape(line)}\b", words):
        return f"{line} is not named: {seen}"
    since = ended - max(float(moment) for moment in re.findall(r"fault at ([\d.]+)", text))
    return "named" if since < REACHES else f"took {since:.1f} s: {seen}"


@pytest.mark.parametrize("seed", range(len(KINDS)), ids=lambda seed: mutate(seed).kind)
def test_a_mistake_is_named(seed: int) -> None:
    outcome = outcome_of(mutate(seed))
    assert outcome in ("named", "harmless"), outcome


@pytest.mark.soak_long
@pytest.mark.parametrize("kind", KINDS)
def test_many_mistakes_are_named(kind: str, note: Note) -> None:
    seeds = range(len(KINDS) + KINDS.index(kind), 300 + len(KINDS), len(KINDS))
    outcomes = [outcome_of(mutate(seed)) for seed in seeds]
    count = {name: outcomes.count(name) for name in ("named", "harmless")}
    note(f"mutations: {kind}: {len(seeds)} programs, {count['named']} named, {count['harmless']} without harm")
    assert not [outcome for outcome in outcomes if outcome not in count]
