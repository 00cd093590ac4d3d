"""From the boxes of all ranks to one finding: who waits where, for whom, and whether that can ever end.

A pure function: it looks at no clock and no file. What it rests on:

- The n-th collective of one rank meets the n-th of every other, and what a rank's n-th was never changes. So two ranks
  whose n-th differ are out of step for certain, at whatever moment each box was read.
- Different numbers prove nothing: ranks leave a collective at different times.
- A rank that lives and is in no collective may still come, however late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from lockstep.blackbox.snapshot import Op, Snapshot
from lockstep.guard import remedies, skipped_backward
from lockstep.guard.diagnosis import Diagnosis, RankLocation
from lockstep.guard.job import JobSnapshot, is_gone, raw_waited, waited
from lockstep.guard.node_exchange import Node
from lockstep.guard.rank_location import at, by_place, ending, label, last_seen, locate, raw_name, span, state
from lockstep.guard.torch_calls import explain, first_difference

# Nobody leaves these before everybody has come.
_MEETING = ("all_reduce", "allreduce", "all_gather", "allgather", "all_to_all", "alltoall", "barrier", "reduce_scatter")
_SAME_SHAPES = ("all_reduce", "allreduce", "all_gather", "allgather", "_allgather_base", "reduce_scatter")
_SHUTDOWN = 3.0
"""Seconds for which others wait before a rank that is done, but whose process is not, counts as gone."""
_RESTART = 20.0
"""The same where a rank that has failed is started again, and the others with it: the launchers of other nodes take
some seconds to learn of it.
"""
_RAW = 3.0
"""Seconds in one of torch's collectives after which a rank counts as waiting for one that is in none."""
_CONFIRMED = 1.0
"""Seconds in which a reporter has looked once more: it beats first, and then records what it sees."""
_COMPANY = "join"
"""How a collective is called in which a rank that has run out of batches answers whatever the others do."""


def diagnose(
    boxes: Sequence[Snapshot],
    *,
    blocked_for: float = 1.0,
    stall: float = 30.0,
    lost: Sequence[Node] = (),
    node: Node | None = None,
    restarts: bool = False,
) -> Diagnosis | None:
    """The finding that matters most, or None while nothing is wrong.

    A rank that is in one collective for ``blocked_for`` seconds counts as waiting. What may still end by itself is a
    finding only after ``stall`` seconds. ``lost`` are nodes that do not answer ``node``, which asks; with
    ``restarts`` ranks are started again when one has failed.
    """
    if not boxes or max(box.world_size for box in boxes) < 2:
        return None
    job = JobSnapshot(
        boxes=sorted(boxes, key=lambda box: box.rank),
        blocked_for=blocked_for,
        stall=stall,
        lost=lost,
        node=node,
        restarts=restarts,
    )
    doubtful = None
    for rule in (_different, _ended_ranks, _raw, _torch_calls, _missing):
        found = rule(job)
        if found is None:
            continue
        if found.certain:
            return found
        doubtful = doubtful or (found if found.seconds >= stall else None)
    return doubtful


def _finding(
    job: JobSnapshot,
    *,
    kind: str,
    certain: bool,
    involved: Sequence[Snapshot],
    headline: str,
    waiting: tuple[RankLocation, ...],
    missing: tuple[RankLocation, ...] = (),
    together: str,
    seconds: float,
    why: remedies.CauseAndFix,
) -> Diagnosis:
    if any(box.recovering for box in involved):
        why = remedies.recovering(why)
        headline = f"{headline.rstrip('.')}, while recovering from a failure."
    elif job.reforming and not certain:
        headline = f"{headline.rstrip('.')}, while the process group is being formed again."
    # Where the calls themselves differ, the lines say nothing more.
    apart = job.apart if not kind.startswith("different") else ()
    skip = None
    if any(place.doing.partition(" in ")[2].startswith(skipped_backward.REDUCTION) for place in waiting):
        skip = skipped_backward.explain_skip(job.members, job.histories) if kind != "different arguments" else None
    if skip is not None:
        why, apart = (remedies.recovering(skip) if any(box.recovering for box in involved) else skip), ()
    return Diagnosis(
        kind=kind,
        certain=certain,
        headline=headline[:1].upper() + headline[1:],
        waiting=waiting,
        missing=missing,
        apart=apart,
        together=together,
        cause=f"{why.cause} {remedies.apart(apart)}" if apart else why.cause,
        fix=why.fix,
        lead=why.lead,
        recorded=skip is not None,
        seconds=seconds,
        stacks=job.stacks((*missing, *waiting)),
    )


# --- two ranks mean different things by one number -----------------------------------------------------------------


def _different(job: JobSnapshot) -> Diagnosis | None:
    number = _first_difference(job)
    if number is None:
        return None
    calls = [(box, job.histories[box.rank][number]) for box in job.members if number in _settled(job, box)]
    names = {op.name for _, op in calls}
    kind = "different ops" if len(names) > 1 else "different arguments"
    waiting = by_place(
        (box.rank, (_standing(box, op), op.site, op.signature if kind == "different arguments" else _for(box, op)))
        for box, op in calls
    )
    involved = [box for box, _ in calls]
    if kind == "different ops":
        why = remedies.different_ops(number, _by_call(calls), job.histories)
        headline = _and([state(place) for place in waiting]) + "."
    else:
        op = calls[0][1]
        what = remedies.what_differs([op.signature for _, op in calls if op.signature])
        if what == "steps":
            why = remedies.different_steps(calls)
            headline = f"Gradients were reduced in {label(op)} after different numbers of optimizer steps."
        else:
            why = remedies.different_arguments(op.name, what)
            headline = f"The ranks called {label(op)} with different {what}."
    return _finding(
        job,
        kind=kind,
        certain=job.is_certain(involved),
        involved=involved,
        headline=headline,
        waiting=waiting,
        together=job.together(before=number),
        seconds=max(box.now - op.since for box, op in calls),
        why=why,
    )


def _settled(job: JobSnapshot, box: Snapshot) -> dict[int, Op]:
    """Collectives that it has completed, or waits in, or died in."""
    history = job.histories[box.rank]
    if box.op is None or is_gone(box) or box.now - box.op.since >= job.blocked_for:
        return history
    return {number: op for number, op in history.items() if number != box.op.seq}


def _first_difference(job: JobSnapshot) -> int | None:
    seen: dict[int, tuple[str, str]] = {}
    different: set[int] = set()
    for box in job.members:
        for number, op in _settled(job, box).items():
            if op.name.startswith(_COMPANY):
                continue
            meant = seen.setdefault(number, (op.name, op.signature))
            if meant[0] != op.name:
                different.add(number)
            elif meant[1] != op.signature:
                if not meant[1]:
                    seen[number] = (op.name, op.signature)
                elif op.signature:
                    different.add(number)
    return min((number for number in different if not _is_refused(job, number)), default=None)


def _is_refused(job: JobSnapshot, number: int) -> bool:
    """Whether every rank got an error for it: then all know, and none used what it would have brought."""
    found = [history[number] for history in job.histories.values() if number in history]
    return len(found) == len(job.members) and all(op.refused for op in found)


def _standing(box: Snapshot, op: Op) -> str:
    if is_gone(box):
        return f"ended in {label(op)}" if box.left < op.seq else f"had left {label(op)}"
    if box.op is not None and box.op.seq == op.seq:
        return f"wait in {label(op)}"
    return f"were refused {label(op)}" if op.refused else f"have left {label(op)}"


def _for(box: Snapshot, op: Op) -> str:
    return f"for {span(box.now - op.since)}" if box.op is not None and box.op.seq == op.seq else ""


def _by_call(calls: Iterable[tuple[Snapshot, Op]]) -> list[remedies.RanksInCall]:
    groups: dict[tuple[str, str], tuple[Op, list[int]]] = {}
    for box, op in calls:
        groups.setdefault((op.name, op.site), (op, []))[1].append(box.rank)
    return [remedies.RanksInCall(op=op, ranks=tuple(ranks)) for op, ranks in groups.values()]


def _and(parts: Sequence[str], most: int = 3) -> str:
    if len(parts) > most:
        return f"{', '.join(parts[:most])}, and more"
    return ", ".join(parts)


def elsewhere(box: Snapshot, generation: int, number: int, since: float) -> str:
    """Where a rank is that has ended, or waits for one that has entered only so many collectives; else empty.

    Each collective needs every rank, so it stays there until that one comes. What the rank's reporter says of torch's
    own collectives counts when the one that asks had stopped at ``since`` already: the rank may have left it together
    with that one, and its reporter is behind.
    """
    if is_gone(box):
        doing, site, _ = _ended(box)
        return state(RankLocation(ranks=(box.rank,), doing=doing, site=site)).removeprefix(f"rank {box.rank} ")
    if box.generation == generation and box.entered > number:
        op = box.op or next((op for op in box.history if op.seq == box.entered), None)
        return f"waits in {at(op)}" if op is not None else "waits in another collective"
    if box.op is None and box.raw is not None and not box.raw.group and _is_meeting(box.raw.name):
        confirmed = raw_waited(box) >= _RAW and box.beat >= since + _CONFIRMED
        return f"waits in torch's {raw_name(box.raw.name)} at {box.raw.site}" if confirmed else ""
    return ""


# --- somebody will never come --------------------------------------------------------------------------------------


def _ended_ranks(job: JobSnapshot) -> Diagnosis | None:
    waiters = [box for box in job.here if waited(box) >= job.blocked_for]
    furthest = max((box.op.seq for box in waiters if box.op), default=0)
    # A box of an older group says nothing about numbers of this one, only that its rank is not there.
    gone = [box for box in job.boxes if is_gone(box) and (box.generation < job.generation or box.left < furthest)]
    if waiters and gone:
        least = min(box.left if box.generation == job.generation else 0 for box in gone)
        waiters = [box for box in waiters if box.op and box.op.seq > least]
        waiting = by_place((box.rank, _waiting(box)) for box in waiters)
        seconds = max(waited(box) for box in waiters)
        # How a rank that is still shutting down ended, its exit code says, which a launcher will have in a moment.
        leaving = any(box.closed == "finished" and box.alive for box in gone)
        patience = _RESTART if job.restarts else _SHUTDOWN if leaving else 0.0
        certain = job.is_certain([*waiters, *gone]) and seconds >= patience
    else:
        waiters = [box for box in job.here if box.op is None and raw_waited(box) >= job.blocked_for]
        gone = [box for box in job.boxes if is_gone(box)]
        if not waiters or not gone:
            return None
        waiting = by_place((box.rank, locate(box)) for box in waiters)
        # A rank may be past a broadcast that others are still in; past an all-reduce it is only with all others.
        proven = any(box.raw and not box.raw.group and _is_meeting(box.raw.name) for box in waiters)
        seconds = max(raw_waited(box) for box in waiters)
        certain = proven and any(not box.alive for box in gone) and job.is_certain([*waiters, *gone])
        certain = certain and (not job.restarts or seconds >= _RESTART)
    missing = _first_to_blame(by_place((box.rank, _ended(box)) for box in gone))
    headline = f"{_and([state(place) for place in missing])}; {_and([state(place) for place in waiting])}"
    return _finding(
        job,
        kind="gone",
        certain=certain,
        involved=[*waiters, *gone],
        headline=f"{headline}, which cannot end without {'it' if len(gone) == 1 else 'them'}.",
        waiting=waiting,
        missing=missing,
        together=job.together(),
        seconds=seconds,
        why=remedies.ended_rank_cause(missing[0], waiting),
    )


def _waiting(box: Snapshot) -> tuple[str, str, str]:
    assert box.op is not None
    return f"wait in {label(box.op)}", box.op.site, _for(box, box.op)


def _ended(box: Snapshot) -> tuple[str, str, str]:
    doing, words = ending(box)
    if not box.closed:  # it died: only the box shows where
        where, site = last_seen(box)
        return f"{doing} after step {box.step}, {where}" if box.step else f"{doing} {where}", site, words
    if box.op is not None and box.closed != "finished":
        return f"{doing} in {label(box.op)}", box.op.site, words
    return doing, box.phase_site if box.closed != "finished" else "", words


def _first_to_blame(places: tuple[RankLocation, ...]) -> tuple[RankLocation, ...]:
    """Those that failed by themselves before those that only lost the others."""
    return tuple(sorted(places, key=lambda place: (remedies.is_follower(place), "finished" in place.doing)))


def _is_meeting(name: str) -> bool:
    return raw_name(name).lstrip("_").startswith(_MEETING)


# --- torch's own collectives ---------------------------------------------------------------------------------------


def _raw(job: JobSnapshot) -> Diagnosis | None:
    blocked = [box for box in job.here if raw_waited(box) >= job.blocked_for]
    clash = _same_number(blocked)
    proven = clash is not None
    if clash is None:
        clash = _crosswise(job, blocked)
        if clash is None:
            return None
        proven = all(box.op is not None or (box.raw and _is_meeting(box.raw.name)) for box in clash)
    waiting = by_place((box.rank, _raw_place(box)) for box in clash)
    names = {raw_name(box.raw.name) for box in clash if box.raw is not None}
    shapes = len(names) == 1 and all(box.raw for box in clash)
    return _finding(
        job,
        kind="raw",
        certain=proven and job.is_certain(clash),
        involved=clash,
        headline=f"{_and([state(place) for place in waiting])}: "
        + ("the same call with different shapes." if shapes else "calls that do not meet."),
        waiting=waiting,
        together=job.together(),
        seconds=max(max(raw_waited(box), waited(box)) for box in clash),
        why=remedies.raw(clash, shapes),
    )


def _same_number(blocked: Sequence[Snapshot]) -> list[Snapshot] | None:
    """Ranks whose collective of one number in one process group differ: in kind, or in shapes that must agree."""
    groups: Mapping[tuple[str, int], list[Snapshot]] = defaultdict(list)
    for box in blocked:
        if box.raw is not None and box.raw.number:
            groups[box.raw.group, box.raw.number].append(box)
    for members in groups.values():
        names = {raw_name(box.raw.name) for box in members if box.raw}
        if len(names) > 1:
            return members
        shapes = {box.raw.shapes for box in members if box.raw and box.raw.shapes}
        if len(shapes) > 1 and next(iter(names)).lstrip("_").startswith(_SAME_SHAPES):
            return members
    return None


def _crosswise(job: JobSnapshot, blocked: Sequence[Snapshot]) -> list[Snapshot] | None:
    """One rank in a direct call of torch, another in a collective of ours: both need everybody.

    Where both numbers in torch's group are known and differ, one rank is only behind the other.
    """
    direct = [box for box in blocked if box.op is None and box.raw is not None and not box.raw.group]
    behind = min((box.left for box in direct), default=0)
    ours = [box for box in job.here if box.op and box.op.seq > behind and waited(box) >= job.blocked_for]
    ours = [box for box in ours if not _may_compute(box)]
    unknown = {box.rank for box in (*direct, *ours) if box.raw is None or not box.raw.number}
    if direct and any(box.rank in unknown for box in ours):
        return [*direct, *(box for box in ours if box.rank in unknown)]
    if ours and any(box.rank in unknown for box in direct):
        return [*(box for box in direct if box.rank in unknown), *ours]
    return None


def _may_compute(box: Snapshot) -> bool:
    """Whether it may be busy inside its collective instead of waiting: backward is mostly computing."""
    return box.op is not None and box.op.name.startswith(("backward", _COMPANY)) and box.raw is None


def _raw_place(box: Snapshot) -> tuple[str, str, str]:
    if box.op is not None:
        inside = f" (torch's {raw_name(box.raw.name)})" if box.raw is not None else ""
        return f"wait in {label(box.op)}{inside}", box.op.site, box.raw.shapes if box.raw else ""
    assert box.raw is not None
    number = f" #{box.raw.number}" if box.raw.number else ""
    return f"wait in torch's {raw_name(box.raw.name)}{number}", box.raw.site, box.raw.shapes


def _torch_calls(job: JobSnapshot) -> Diagnosis | None:
    """Ranks that wait, and whose earlier calls in torch's process group were not the same."""
    blocked = [box for box in job.here if max(waited(box), raw_waited(box)) >= job.blocked_for]
    calls = first_difference(blocked)
    if calls is None:
        return None
    involved = [box for box in blocked if box.rank in calls]
    places = by_place(
        (rank, (f"called torch's {call.name} #{call.number}", call.site, f"sizes {call.shapes}" if call.shapes else ""))
        for rank, call in calls.items()
    )
    return _finding(
        job,
        kind="different torch calls",
        certain=job.is_certain(involved),
        involved=involved,
        headline=f"{_and([state(place) for place in places])}: calls that do not meet.",
        waiting=places,
        together=job.together(),
        seconds=max(max(waited(box), raw_waited(box)) for box in involved),
        why=explain(calls, involved),
    )


# --- somebody has not come yet -------------------------------------------------------------------------------------


def _missing(job: JobSnapshot) -> Diagnosis | None:
    waits = {box.rank: max(waited(box), raw_waited(box) if box.op is None else 0.0) for box in job.here}
    longest = max(waits.values(), default=0.0)
    if longest < job.stall:
        return None
    numbers = [box.op.seq for box in job.here if box.op and waits[box.rank] >= job.stall]
    top = max(numbers, default=0)
    waiting, behind = [], []
    arriving = False
    for box in job.boxes:
        if box.generation != job.generation or is_gone(box):
            behind += [box] if box.generation != job.generation or box.left < top else []
        elif _is_behind(job, box, top):
            behind.append(box)
        elif waits[box.rank] >= job.blocked_for:
            waiting.append(box)
        else:
            arriving = arriving or box.op is not None
    if not behind and not job.unseen:
        return None if arriving else _all_wait(job, waiting, longest)
    missing = by_place((box.rank, _locate(job, box)) for box in behind)
    missing += tuple(_unseen(job))
    places = by_place((box.rank, _waiting(box) if box.op else locate(box)) for box in waiting)
    return _finding(
        job,
        kind="missing",
        certain=False,
        involved=[*waiting, *behind],
        headline=f"{_and([state(place) for place in places])} for {span(longest)}; "
        f"{_and([state(place) for place in missing])}.",
        waiting=places,
        missing=missing,
        together=job.together(),
        seconds=longest,
        why=remedies.missing(missing),
    )


def _unseen(job: JobSnapshot) -> Iterator[RankLocation]:
    """Ranks whose boxes were not read, those of a node that does not answer by themselves."""
    left = set(job.unseen)
    for node in job.lost:
        ranks = left & set(node.ranks)
        if ranks:
            left -= ranks
            where = f"node {node.number} (host {node.host})"
            between = f"no connection between {job.node.place} and {node.place}" if job.node is not None else ""
            doing = f"are lost with {where}, which does not answer"
            yield RankLocation(ranks=tuple(sorted(ranks)), doing=doing, detail=between)
    if left:
        yield RankLocation(ranks=tuple(sorted(left)), doing="have not been heard of (other machines, or no black box)")


def _is_behind(job: JobSnapshot, box: Snapshot, top: int) -> bool:
    if box.op is None:
        if box.raw is not None and raw_waited(box):
            return top > 0 and box.left < top
        return box.left < top or not top
    if box.op.seq < top:
        return True
    # All are in the same backward: those that have started to average gradients wait for those that have not.
    return box.op.seq == top and (box.paused or (_may_compute(box) and top in job.averaging))


def _locate(job: JobSnapshot, box: Snapshot) -> tuple[str, str, str]:
    if is_gone(box):
        return _ended(box)
    if box.generation != job.generation:
        return "have not joined the process group that the others have formed again", locate(box)[1], ""
    if box.op is None or box.paused:
        return locate(box)
    doing = f"are computing in {label(box.op)}" if _may_compute(box) else f"are still in {label(box.op)}"
    return doing, locate(replace(box, raw=None))[1] or box.op.site, _for(box, box.op)


def _all_wait(job: JobSnapshot, waiting: Sequence[Snapshot], longest: float) -> Diagnosis:
    places = by_place((box.rank, _waiting(box) if box.op else locate(box)) for box in waiting)
    everybody = len(waiting) == len(job.boxes)
    return _finding(
        job,
        kind="all wait",
        certain=False,
        involved=waiting,
        headline=f"{_and([state(place) for place in places])} for {span(longest)}: "
        + ("all have come to it." if everybody else "the others have completed it."),
        waiting=places,
        together=job.together(),
        seconds=longest,
        why=remedies.all_wait(),
    )
