"""Who waited in which collective when torch's watchdog gave up, and who was not there.

Torch numbers the collectives of each group. A rank that waits says the number it waits in; every rank, also one that is
told of the timeout by another, says the last number that it has started and the last that it has finished. Side by
side they name the rank that is missing, which no line does by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.doctor.finding import Finding
from lockstep.rundir.format_ranks import name_ranks

MOST = 50_000
"""Ranks and groups of which the numbers are kept."""
_FEW = 6
_LONGEST = 15
"""Digits of a number that can be one: older versions print what was never set."""
_WORK = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<kind>\w+)"
    r"(?:, NumelIn=(?P<size>\d+))?"
)
_GROUP = re.compile(r"\[PG (?:ID \d+ PG GUID )?(?P<group>[^\]]*?) ?Rank \d+\]")
_REACHED = re.compile(
    r"(?:at (?:NCCL )?work(?: sequence id)?: (?P<at>\d+),?.*?)?"
    r"last enqueued (?:NCCL )?work: (?P<started>-?\d+), last completed (?:NCCL )?work: (?P<finished>-?\d+)",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A collective."""

    kind: str
    """What torch calls it: ALLREDUCE, BROADCAST, …"""
    size: int | None
    """Elements that go in, where torch says so."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """How far a rank has come in a group; -1 is before the first."""

    at: int | None = None
    """The collective it waited in until the timeout; None for one that was only told of it."""
    started: int | None = None
    """The last one it has started."""
    finished: int | None = None
    """The last one it has finished."""


@dataclass(kw_only=True)
class Waiting:
    """What the ranks have said."""

    works: dict[tuple[int, int], Work] = field(default_factory=dict)
    """Rank and number -> the collective."""
    reached: dict[tuple[str, int], Reached] = field(default_factory=dict)
    """Group and rank -> how far it has come."""

    def read(self, line: str, rank: int) -> None:
        """Take in a line of torch's."""
        if len(self.works) + len(self.reached) >= MOST:
            return
        if found := _WORK.search(line):
            size = found["size"]
            work = Work(kind=found["kind"], size=int(size) if size and len(size) <= _LONGEST else None)
            if (number := _number(found["number"])) is not None:
                self.works.setdefault((rank, number), work)
        if found := _REACHED.search(line):
            group = _GROUP.search(line)
            started, finished = _number(found["started"]), _number(found["finished"])
            if started is not None and finished is not None and finished > started:
                finished = None
            progress = Reached(at=_number(found["at"]), started=started, finished=finished)
            key = (group["group"].strip() if group else "", rank)
            before = self.reached.get(key)
            # The first word counts: what comes later is said while all is taken down.
            if before is None or (before.at is None and progress.at is not None):
                self.reached[key] = progress

    def groups(self) -> dict[str, dict[int, Reached]]:
        """How far the ranks of each group have come.

        Of some ranks only the collective is known, and not its group. It is the one in which others wait in a
        collective of this number, if there is one; otherwise a group without a name.
        """
        found: dict[str, dict[int, Reached]] = {}
        for (group, rank), reached in self.reached.items():
            found.setdefault(group, {})[rank] = reached
        waited = {group: {reached.at for reached in members.values()} for group, members in found.items()}
        placed = {rank for _, rank in self.reached}
        for rank, number in sorted(self.works):
            if rank not in placed:
                fitting = [group for group, numbers in waited.items() if number in numbers]
                # Several may have timed out: the first of them is the one that holds up the others.
                members = found.setdefault(fitting[0] if len(fitting) == 1 else "", {})
                members.setdefault(rank, Reached(at=number))
        return found


def _number(text: str | None) -> int | None:
    return int(text) if text and len(text) <= _LONGEST else None


def findings(waiting: Waiting, seen: Iterable[int]) -> Iterator[Finding]:
    """One for each group in which somebody waited; ``seen`` are the ranks that the job is known to have."""
    groups = waiting.groups()
    silent = sorted(set(seen) - {rank for members in groups.values() for rank in members})
    for group, members in sorted(groups.items()):
        waited = [reached.at for reached in members.values() if reached.at is not None]
        if waited:
            # Of smaller groups it is not known who belongs to them.
            yield _one(waiting, group, members, min(waited), silent if _is_whole(group) or len(groups) == 1 else [])


def _is_whole(group: str) -> bool:
    """Whether this is the group of all ranks."""
    return "default_pg" in group or group in ("", "0")


def _one(waiting: Waiting, group: str, members: dict[int, Reached], number: int, unknown: list[int]) -> Finding:
    absent = [rank for rank, reached in members.items() if reached.started is not None and reached.started < number]
    # Who waits in a later one has this one behind it, if both are of one group: of older logs that is not known.
    later = {rank: reached.at for rank, reached in members.items() if reached.at is not None and reached.at > number}
    past = [rank for rank, reached in members.items() if reached.finished is not None and reached.finished >= number]
    past += [rank for rank in later if group and rank not in past]
    elsewhere = {} if group else later
    inside = sorted(set(members) - set(absent) - set(past) - set(elsewhere))
    works = {rank: waiting.works[rank, number] for rank in inside if (rank, number) in waiting.works}
    kinds = sorted({_called(work) for work in works.values()})
    name = kinds[0] if len(kinds) == 1 else "a collective"
    of = "" if _is_whole(group) else f" of group {group}"
    parts = [f"{name_ranks(inside, _FEW)} waited in {name}, number {number}{of}, until the timeout"]
    if absent:
        last = sorted({members[rank].started or 0 for rank in absent})
        far = f"number {last[0]}" if len(last) == 1 else f"numbers {last[0]} to {last[-1]}"
        parts.append(f"{name_ranks(absent, _FEW)} never started it, and got as far as {far}")
    if past:
        parts.append(f"{name_ranks(past, _FEW)} had finished it")
    if len(kinds) > 1:
        by_kind = {kind: [rank for rank, work in works.items() if _called(work) == kind] for kind in kinds}
        parts.append("; ".join(f"{name_ranks(ranks, _FEW)} called {kind}" for kind, ranks in by_kind.items()))
    elif unknown:
        parts.append(f"{name_ranks(unknown, _FEW)} said nothing of it")
    for there in sorted(set(elsewhere.values())):
        ranks = [rank for rank, at in elsewhere.items() if at == there]
        theirs = sorted({_called(waiting.works[rank, there]) for rank in ranks if (rank, there) in waiting.works})
        parts.append(f"{name_ranks(ranks, _FEW)} in {' or '.join(theirs) or 'a collective'}, number {there}")
    why, fix = _advice(kinds, absent, past, inside, unknown, bool(elsewhere))
    data: dict[str, Any] = {"group": group, "number": number, "collectives": kinds, "waiting": inside}
    data |= {"absent": sorted(absent), "past": sorted(past), "silent": unknown}
    data |= {"elsewhere": {str(rank): at for rank, at in sorted(elsewhere.items())}}
    return Finding(check="nccl waiting", status="error", what="; ".join(parts), why=why, fix=fix, data=data)


def _called(work: Work) -> str:
    return work.kind if work.size is None else f"{work.kind} of {work.size} element{'s' if work.size != 1 else ''}"


def _advice(
    kinds: list[str], absent: list[int], past: list[int], inside: list[int], unknown: list[int], elsewhere: bool
) -> tuple[str, str]:
    """Why it stood still, and what to do, as far as the numbers show it."""
    if elsewhere:
        return (
            "ranks that wait in different collectives wait for each other for ever, if these are of one group; these "
            "logs do not say of which they are",
            f"Look at what {name_ranks(inside, _FEW)} called there, which the others are past, or never call; a newer "
            "torch also says the group.",
        )
    if len(kinds) > 1:
        return (
            "ranks that call different collectives, or with different sizes, wait for each other for ever",
            "Look for an `if` that depends on the rank or on its data around these calls; `lockstep launch` says the "
            "two lines.",
        )
    if absent:
        return (
            f"a collective ends only when all ranks take part: the others waited for {name_ranks(absent, _FEW)}",
            f"Look at what {name_ranks(absent, _FEW)} did then: an exception further up in its log, a loop with fewer "
            "steps, something long that only it does, or a call that blocks.",
        )
    if past:
        return (
            f"it ended on some ranks and not on {name_ranks(inside, _FEW)}: the way to there, or the GPU, stands still",
            f"Look at {name_ranks(inside, _FEW)}: its GPU (nvidia-smi, dmesg), and its part of the network "
            "(lockstep doctor net).",
        )
    if unknown:
        return (
            "a collective ends only when all ranks take part; a rank that says nothing was elsewhere, or had ended",
            f"Give this command the logs of {name_ranks(unknown, _FEW)} too, and look there for what happened.",
        )
    if len(inside) == 1:
        return (
            "a collective ends only when all ranks take part; of the others nothing is known here",
            "Give this command the logs of the other ranks too.",
        )
    return (
        "all ranks that are known had come to it with the same size, and it did not end",
        "Look at the network and the GPUs: lockstep doctor net, dmesg, nvidia-smi. If logs of ranks are missing here, "
        "give them too.",
    )
