"""A rank that leaves backwards out: named where the boxes show it, and never where ranks only differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.blackbox.snapshot import Op, Snapshot
from lockstep.guard.diagnose import diagnose
from lockstep.guard.skipped_backward import explain_skip, find_ahead, warn_of_skip

SKIP: dict[str, Any] = {"skipped": 1, "skipped_step": 3, "skipped_at": "train.py:18"}


def rank(number: int, batches: Sequence[int], **more: Any) -> Snapshot:
    """A rank whose loader was at these batches in its backwards."""
    ops = tuple(
        Op(seq=seq, name="backward", site="train.py:20", signature=f"after {seq - 1} optimizer steps", batch=batch)
        for seq, batch in enumerate(batches, 1)
    )
    return Snapshot(
        rank=number, world_size=2, entered=len(ops), left=len(ops), history=ops, now=1000.0, **{"alive": True, **more}
    )


def histories(*boxes: Snapshot) -> dict[int, dict[int, Op]]:
    return {box.rank: {op.seq: op for op in box.history} for box in boxes}


def test_a_rank_that_went_ahead_and_stayed_so() -> None:
    found = find_ahead(histories(rank(0, [1, 2, 3, 4, 5, 6]), rank(1, [1, 2, 3, 5, 6, 7])))
    assert found is not None
    assert (found.rank, found.number, found.batches) == (1, 4, (5, 4))


def test_a_rank_that_is_read_ahead_is_not_called_ahead() -> None:
    assert find_ahead(histories(rank(0, [1, 2, 3, 4, 5, 6]), rank(1, [3, 4, 4, 6, 6, 9]))) is None
    assert find_ahead(histories(rank(0, [1, 2, 3, 4]), rank(1, [2, 3, 4, 5]))) is None  # for as long as is known
    assert find_ahead(histories(rank(0, [0, 0, 0]), rank(1, [1, 2, 3]))) is None  # no prepared loader on one


def test_it_warns_only_when_both_hold_on_one_rank() -> None:
    even, ahead = rank(0, [1, 2, 3, 4, 5, 6]), [1, 2, 3, 5, 6, 7]
    for other in (rank(1, ahead), rank(1, [1, 2, 3, 4, 5, 6], **SKIP)):
        assert warn_of_skip([even, other], histories(even, other)) is None
    skipping = rank(1, ahead, **SKIP)
    found = warn_of_skip([even, skipping], histories(even, skipping))
    assert found is not None
    assert found[0] == 1
    assert "rank 1 called the model at train.py:18 without a backward (after 3 updates)" in found[1]
    assert "batch 5 with those of batch 4 on rank 0" in found[1]


def test_all_ranks_that_call_the_model_twice_are_no_cause() -> None:
    boxes = [rank(number, [1, 2, 3], **SKIP) for number in (0, 1)]
    assert explain_skip(boxes, histories(*boxes)) is None


def test_a_call_that_still_waits_for_its_backward_counts_once_the_rank_went_elsewhere() -> None:
    even = rank(0, [1, 2, 3])
    assert explain_skip([even, rank(1, [1, 2, 3], pending_at="train.py:18")], {}) is None
    ended = rank(1, [1, 2, 3], pending_at="train.py:18", closed="finished", step=3)
    why = explain_skip([even, ended], {})
    assert why is not None
    assert "Rank 1 called the model at train.py:18 and left out its backward after 3 updates" in why.cause


def test_a_wait_for_it_names_the_line() -> None:
    waiting = rank(0, [1, 2, 3, 4])
    inside = waiting.history[-1]
    waiting = Snapshot(**{**vars(waiting), "op": inside, "left": 3})
    found = diagnose([waiting, rank(1, [1, 2, 4], closed="finished", alive=False, **SKIP)])
    assert found is not None
    assert (found.kind, found.certain, found.recorded) == ("gone", True, True)
    assert "Rank 1 called the model at train.py:18" in found.cause
    assert "skip on every rank or on none" in found.fix
