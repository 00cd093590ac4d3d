"""Models that change after prepare, copies of what was prepared, and small things around them."""

from __future__ import annotations

import pytest

from tests.parity.compare import differences
from tests.parity.run import Runs


@pytest.mark.parametrize("change", ["freeze", "unfreeze", "grow", "swap"])
def test_a_changed_model_that_is_prepared_again_trains_the_same(runs: Runs, change: str) -> None:
    assert differences(runs, f"models/again/{change}") == []


def test_a_frozen_model_can_be_prepared_and_trained_later(runs: Runs) -> None:
    # Ours to choose: on several CPUs Accelerate lets torch's error through.
    if runs.world_size == 1:
        assert differences(runs, "models/again/unfreeze all") == []
        return
    for theirs, ours in runs.pairs("models/again/unfreeze all"):
        assert theirs["raises"] == "RuntimeError"
        assert ours["type"] == "DistributedDataParallel"


def test_a_model_for_evaluation_can_be_trained_later(runs: Runs) -> None:
    # Ours to choose: Accelerate gives it back as it is, so that each rank would train its own.
    for theirs, ours in runs.pairs("models/evaluation"):
        assert theirs == {"tuple": ["Sequential"] * 3}
        wrapped = "Sequential" if runs.world_size == 1 else "DistributedDataParallel"
        assert ours == {"tuple": ["Sequential", wrapped, "Sequential"]}


@pytest.mark.parametrize("way", ["copied", "pickled", "averaged", "EMA"])
def test_copies_compute_the_same(runs: Runs, way: str) -> None:
    assert differences(runs, f"models/copies/{way}") == []


@pytest.mark.parametrize(
    "name",
    ["copied optimizers", "unwrap", "leaves", "stacklevel", "shared", "naming", "schedule", "print"],
)
def test_these_are_the_same(runs: Runs, name: str) -> None:
    assert differences(runs, f"models/{name}") == []
