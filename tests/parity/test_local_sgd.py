"""Local SGD: the same weights on every rank after every step."""

from __future__ import annotations

from tests.parity.compare import differences
from tests.parity.run import Runs


def test_weights_and_gradients_are_the_same(runs: Runs) -> None:
    names = runs.names("local sgd/")
    assert len(names) == 5
    for name in names:
        assert differences(runs, name) == []
        for theirs, ours in runs.pairs(name):
            assert "raises" not in theirs
            assert ours["enabled"] == (runs.world_size > 1 and not name.endswith("off"))


def test_ranks_differ_between_averages_and_agree_after_them(runs: Runs) -> None:
    if runs.world_size == 1:
        return
    first, second = (seen["local sgd/every third"]["weights"] for seen in runs.lockstep)
    assert [mine == other for mine, other in zip(first, second, strict=True)] == [
        *(False, False, True, False, False, True, True)
    ]
