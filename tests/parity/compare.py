"""Where two notes of the script differ."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tests.parity.run import Runs

TOLERANCE = 1e-6


def differences(runs: Runs, *prefixes: str, without: Collection[str] = (), may_raise: bool = False) -> list[str]:
    """One line per difference between the libraries in these scenarios (names or beginnings of names), on any rank.

    ``without``: keys that are left out wherever they appear. A scenario that ends with an error in Accelerate is a
    mistake in the scenario unless it ``may_raise``.
    """
    names = [name for prefix in prefixes for name in ([prefix] if runs.has(prefix) else runs.names(prefix))]
    assert names, f"no scenario is called {prefixes}"
    found = []
    for name in names:
        for rank, (theirs, ours) in enumerate(runs.pairs(name)):
            assert may_raise or not raises(theirs), f"{name} does not run under Accelerate: {theirs}"
            found += [f"{name}, rank {rank}{line}" for line in _walk(theirs, ours, frozenset(without))]
    return found


def raises(value: Any) -> bool:
    """Whether this is the note of an error."""
    return isinstance(value, dict) and "raises" in value


def _walk(theirs: Any, ours: Any, without: frozenset[str], path: str = "") -> list[str]:
    if raises(theirs) and raises(ours):
        # Whoever catches Accelerate's error catches ours.
        return [] if theirs["raises"] in ours["bases"] else [_line(path, theirs["raises"], ours["raises"])]
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = [key for key in (*theirs, *(key for key in ours if key not in theirs)) if key not in without]
        pairs = [(key, theirs.get(key, "(nothing)"), ours.get(key, "(nothing)")) for key in keys]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = [(place, *pair) for place, pair in enumerate(zip(theirs, ours, strict=True))]
    else:
        equal = type(theirs) is type(ours) and (
            abs(theirs - ours) <= TOLERANCE if isinstance(theirs, float) else theirs == ours
        )
        return [] if equal else [_line(path, theirs, ours)]
    return [line for key, left, right in pairs for line in _walk(left, right, without, f"{path}/{key}")]


def _line(path: str, theirs: Any, ours: Any) -> str:
    return f"{path}: Accelerate {str(theirs)[:100]}, Lockstep {str(ours)[:100]}"
