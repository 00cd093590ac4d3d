"""A rank that leaves a backward out, as the boxes show it: the cause of many waits, and in itself no error.

Nothing here proves that ranks are out of step. It explains a wait that is proven, and warns while the job still runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.blackbox.snapshot import Op, Snapshot
from lockstep.guard.rank_location import RANGES
from lockstep.guard.remedies import TOGETHER, CauseAndFix
from lockstep.rundir.format_ranks import name_ranks

REDUCTION = "backward"
Histories = Mapping[int, Mapping[int, Op]]
_SETTLED = 3
"""Reductions for which a loader must be ahead by the same number of batches."""


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A rank whose loader is further than the others'."""

    rank: int
    number: int
    """The first reduction at which it was."""
    batches: tuple[int, int]
    """Its own batch at that reduction, and the others'."""


def explain_skip(boxes: Sequence[Snapshot], histories: Histories) -> CauseAndFix | None:
    """Cause and fix, where one rank has called the model without a backward, or has drawn a batch more."""
    odd = more_skips(boxes)
    if odd is not None:
        count, step, site = _skips(odd), odd.skipped_step, odd.skipped_at
        if not odd.skipped:
            step, site = odd.step, odd.pending_at
        often = "" if count == 1 else f" {count} times, the first time"
        return CauseAndFix(
            cause=f"Rank {odd.rank} called the model at {site} and left out its backward{often} after "
            f"{step} update{'s' * (step != 1)}: a `continue` (a NaN loss that is skipped, say), a condition that holds "
            "on that rank only, or an exception that was caught.",
            fix=TOGETHER,
            lead=f"Rank {odd.rank} left out a backward, after it called the model at {site}.",
        )
    ahead = find_ahead(histories, settled=1)  # that something is wrong is proven already
    if ahead is None:
        return None
    own, theirs = ahead.batches
    return CauseAndFix(
        cause=f"At {REDUCTION} #{ahead.number} rank {ahead.rank} was at batch {own} of its loader, the others at batch "
        f"{theirs}: it went on to the next batch without a backward, by a `continue`, a condition that holds on that "
        "rank only, or an exception that was caught.",
        fix=TOGETHER,
        lead=f"Rank {ahead.rank} went on to its next batch without a backward, before {REDUCTION} #{ahead.number}.",
    )


def warn_of_skip(boxes: Sequence[Snapshot], histories: Histories) -> tuple[int, str] | None:
    """A rank that has both called the model without a backward and is ahead of the others, and the line to log."""
    odd, ahead = more_skips(boxes), find_ahead(histories)
    if odd is None or ahead is None or odd.rank != ahead.rank or not odd.skipped:
        return None
    own, theirs = ahead.batches
    step = odd.skipped_step
    others = [box.rank for box in boxes if box.rank != odd.rank]
    return odd.rank, (
        f"rank {odd.rank} called the model at {odd.skipped_at} without a backward (after {step} "
        f"update{'s' * (step != 1)}), and is ahead since: it reduces the gradients of batch {own} with those of batch "
        f"{theirs} on {name_ranks(others, RANGES)}. At the end of the epoch it has a backward less than the others, "
        f"which will wait for it. {TOGETHER}"
    )


def more_skips(boxes: Sequence[Snapshot]) -> Snapshot | None:
    """The one rank that has called the model without a backward more often than all others."""
    if len(boxes) < 2:
        return None
    *_, next_most, most = sorted(boxes, key=_skips)
    return most if _skips(most) > _skips(next_most) and (most.skipped_at or most.pending_at) else None


def _skips(box: Snapshot) -> int:
    """Calls without a backward; the last one is one as well when the rank has gone on to something else."""
    gone_on = box.closed != "" or not box.alive or (box.op is not None and box.op.name != REDUCTION)
    return box.skipped + bool(box.pending_at and gone_on)


def find_ahead(histories: Histories, settled: int = _SETTLED) -> Ahead | None:
    """A rank whose loader went ahead at some reduction and has stayed so for ``settled`` of them.

    One that is read ahead of the training is sometimes more and sometimes less ahead.
    """
    if len(histories) < 2:
        return None
    at = {
        rank: {number: op.batch for number, op in history.items() if op.name == REDUCTION and op.batch}
        for rank, history in histories.items()
    }
    common = sorted(set.intersection(*(set(batches) for batches in at.values())))
    for rank, batches in at.items():
        others = [theirs for other, theirs in at.items() if other != rank]
        leads = [{batches[number] - theirs[number] for theirs in others} for number in common]
        if any(len(lead) > 1 for lead in leads):
            continue  # the others are not at one batch themselves
        by = [lead.pop() for lead in leads]
        first = next((place for place, lead in enumerate(by) if lead), None)
        if not first:
            continue  # never ahead, or for as long as is known
        since = by[first:]
        if since[0] > 0 and len(set(since)) == 1 and len(since) >= settled:
            number = common[first]
            return Ahead(rank=rank, number=number, batches=(batches[number], others[0][number]))
    return None
