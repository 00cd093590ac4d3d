"""The collectives of torch's process group, as torch's Flight Recorder lists them on each rank.

gloo pairs the n-th collective of one rank with the n-th of every other. A call of torch.distributed that one rank
leaves out shifts all later ones: what its peers sent meets its next call, which aborts, blocks, or returns garbage.
Afterwards every rank may wait in the same line, and only these lists show where they parted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.blackbox import sites
from lockstep.blackbox.snapshot import Snapshot, TorchCall
from lockstep.guard.rank_location import RANGES, raw_name
from lockstep.guard.remedies import CauseAndFix
from lockstep.rundir.format_ranks import name_ranks

MOST = 256
"""Calls of a rank that are kept, counted from its latest."""
_EQUAL_SIZES = ("all_reduce", "allreduce")


def is_default(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of Flight Recorder belongs to the group of all ranks."""
    described = entry.get("process_group") or ("", "default_pg")
    return bool(described[-1] == "default_pg")


def calls_of(entries: Iterable[Mapping[str, Any]], since_ns: int) -> tuple[TorchCall, ...]:
    """The latest collectives in the group of all ranks, oldest first; those before ``since_ns`` are of an older one."""
    found: list[TorchCall] = []
    for entry in entries:
        number = int(entry.get("collective_seq_id") or 0)
        if entry.get("is_p2p") or not number or not is_default(entry) or entry.get("time_created_ns", 0) < since_ns:
            continue
        if found and number < found[-1].number:
            found.clear()  # a new process group counts from 1 again
        sizes = entry.get("input_sizes") or ()
        found.append(
            TorchCall(
                number=number,
                name=raw_name(str(entry.get("profiling_name", ""))),
                shapes=str(sizes) if sizes else "",
                elements=sum(math.prod(size) for size in sizes),
                site=_site(entry.get("frames") or ()),
            )
        )
    times = Counter(call.number for call in found)  # calls that torch has coalesced share a number
    return tuple(call for call in found[-MOST:] if times[call.number] == 1)


def _site(frames: Iterable[Mapping[str, Any]]) -> str:
    """The user's innermost line, of frames that are listed innermost first."""
    users = (frame for frame in frames if sites.is_user_file(str(frame.get("filename", ""))))
    return next((f"{frame.get('filename')}:{frame.get('line')}" for frame in users), "")


def first_difference(boxes: Sequence[Snapshot]) -> dict[int, TorchCall] | None:
    """The first number at which ranks made different calls: rank -> its call. None where the lists agree."""
    lists = {box.rank: {call.number: call for call in box.torch_calls} for box in boxes if box.torch_calls}
    for number in sorted(set().union(*lists.values())):
        calls = {rank: calls[number] for rank, calls in lists.items() if number in calls}
        names = {call.name for call in calls.values()}
        elements = {call.elements for call in calls.values() if call.shapes}
        # An all-reduce may have other shapes of as many elements; NCCL gathers and scatters unequal parts.
        if len(names) > 1 or (len(elements) > 1 and next(iter(names)).startswith(_EQUAL_SIZES)):
            return calls
    return None


def explain(calls: Mapping[int, TorchCall], boxes: Sequence[Snapshot]) -> CauseAndFix:
    """Who left out or added which call, where the calls that follow show it."""
    number = next(iter(calls.values())).number
    following = {box.rank: next((call for call in box.torch_calls if call.number == number + 1), None) for box in boxes}
    alike: dict[TorchCall, list[int]] = {}
    for rank, call in sorted(calls.items()):
        alike.setdefault(call, []).append(rank)
    # Whoever makes next what the others make now has made a call that they did not.
    for call, ranks in sorted(alike.items(), key=lambda item: -len(item[1])):
        others = [rank for rank in calls if rank not in ranks]
        theirs = {(calls[rank].name, calls[rank].shapes, calls[rank].site) for rank in others}
        nexts = {following[rank] for rank in ranks}
        if len(theirs) == 1 and all(then and (then.name, then.shapes, then.site) in theirs for then in nexts):
            where = f" at {call.site}" if call.site else ""
            return CauseAndFix(
                cause=f"{name_ranks(ranks, RANGES).capitalize()} called torch's {call.name}{where}; "
                f"{name_ranks(others, RANGES)} did not. From there on calls of torch.distributed are paired wrongly.",
                fix="Let every rank make that call, or none: look for a condition on the rank, or on data, around it.",
                lead=f"{name_ranks(others, RANGES).capitalize()} did not make the call of torch's {call.name}{where}.",
            )
    return CauseAndFix(
        cause=f"Collective {number} of torch's process group is not the same call on all ranks, so it was paired "
        "wrongly, and all later ones were.",
        fix="Let every rank make the same calls in the same order: those of torch.distributed and those of Lockstep.",
    )
