"""Short training runs: losses, weights after every step, gradient norms, learning rates, and when gradients sync."""

from __future__ import annotations

import pytest

from tests.parity.compare import TOLERANCE, differences
from tests.parity.run import Runs

# Accelerate says at once what Lockstep says with the last batch: see test_data.py.
LATER = ("remainder",)


@pytest.mark.parametrize("kind", ["plain", "accumulate", "tail/exact"])
def test_training_is_the_same(runs: Runs, kind: str) -> None:
    assert differences(runs, f"train/{kind}", without=LATER) == []


@pytest.mark.parametrize("schedule", ["lambda", "cosine", "one_cycle"])
def test_the_learning_rate_curve_is_the_same(runs: Runs, schedule: str) -> None:
    names = [name for name in runs.names(f"train/schedule/{schedule}") if "short" not in name]
    assert len(names) == 5
    assert differences(runs, *names, without=LATER) == []


def test_a_cycle_that_is_too_short_stays_at_its_end(runs: Runs) -> None:
    short = "train/schedule/one_cycle_short"
    names = [name for name in runs.names(short) if "split" not in name]
    assert differences(runs, *names, without=LATER, may_raise=True) == []
    # Ours to choose: with split batches Accelerate lets torch's error through, and only there.
    for theirs, ours in runs.pairs(f"{short}, split batches"):
        assert theirs["raises"] == "ValueError"
        assert ours["rate"][-1] == ours["rate"][-2] != ours["rate"][0]


def test_the_tail_of_a_window_is_averaged_over_what_it_has(runs: Runs) -> None:
    # Ours to choose: one micro-batch is left for a window of three. Accelerate divides its loss by three.
    for theirs, ours in runs.pairs("train/tail/default"):
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=TOLERANCE)
        assert theirs["sync"] == ours["sync"]
        before = ours["weights"][-2]
        assert theirs["weights"][-2] == pytest.approx(before, abs=TOLERANCE)
        their_step = [after - start for after, start in zip(theirs["weights"][-1], before, strict=True)]
        our_step = [after - start for after, start in zip(ours["weights"][-1], before, strict=True)]
        assert our_step == pytest.approx([3 * change for change in their_step], abs=TOLERANCE)
        assert max(map(abs, our_step)) > 1e-3


def test_fp16_on_a_cpu_is_fp16(runs: Runs) -> None:
    # Ours to choose: Accelerate says "fp16" and computes in full precision.
    for theirs, ours in runs.pairs("facts/fp16"):
        assert theirs == {"mode": "fp16", "scaled": False, "output": "torch.float32", "inside": "torch.float32"}
        assert ours == {"mode": "fp16", "scaled": True, "output": "torch.float32", "inside": "torch.float16"}
