"""Experiment trackers: who is called with what, on which process; what TensorBoard has stored."""

from __future__ import annotations

import pytest

from tests.parity.compare import differences
from tests.parity.run import Runs


def test_trackers_of_the_script(runs: Runs) -> None:
    for name in ("trackers/own", "trackers/registered"):
        assert differences(runs, name, without=("absent",)) == []
        for rank, (theirs, ours) in enumerate(runs.pairs(name)):
            # Both raise a ValueError for a name that does not run on the main process; ours has a name of its own.
            assert theirs["absent"] == ours["absent"] if rank else "ValueError" in ours["absent"]["bases"]
            assert ours["running"] == ([] if rank else theirs["running"])


def test_what_may_be_asked_for(runs: Runs) -> None:
    for theirs, ours in runs.pairs("trackers/chosen"):
        for name in ("none", "own", "without trackers"):
            assert theirs[name] == ours[name]
        for name in ("unknown", "nameless"):
            assert theirs[name]["raises"] in ours[name]["bases"]


def test_the_names(runs: Runs) -> None:
    for theirs, ours in runs.pairs("trackers/names"):
        assert set(ours) - set(theirs) == {"jsonl"}
        assert set(theirs) <= set(ours)


def test_tensorboard_has_the_same(runs: Runs) -> None:
    if "not installed" in (runs.lockstep[0]["trackers/tensorboard"], runs.accelerate[0]["trackers/tensorboard"]):
        pytest.skip("tensorboard is not installed")
    assert differences(runs, "trackers/tensorboard", without=("without a folder",)) == []
    refused = runs.lockstep[0]["trackers/tensorboard"]["without a folder"]
    assert runs.accelerate[0]["trackers/tensorboard"]["without a folder"]["raises"] in refused["bases"]
