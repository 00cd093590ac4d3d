"""Which calls of two traces are the same call, in what order all of them stand, and several ranks taken as one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from lockstep.traces.frames import Frame, Stat

Item = TypeVar("Item")
Key = tuple[str, str, int, int]
"""What makes a call the same call: phase, module, number of the call, and how often these three came before."""


def keyed(frames: Iterable[Frame]) -> dict[Key, Frame]:
    """The frames of one batch by what makes them the same call, in order of execution.

    The gradients of a module's parameters come one by one, in an order that no two runs need to share: frames of one
    call that have no tensor in common are parts of one.
    """
    found: dict[Key, Frame] = {}
    seen: Counter[tuple[str, str, int]] = Counter()
    for frame in frames:
        call = (frame.phase, frame.module, frame.call)
        last = (*call, seen[call] - 1)
        before = found.get(last)
        if before is not None and not {stat.name for stat in before.stats} & {stat.name for stat in frame.stats}:
            found[last] = replace(before, stats=before.stats + frame.stats)
        else:
            key = (*call, seen[call])
            found[key] = frame
            seen[call] += 1
    return found


def merged_order(orders: Sequence[Sequence[Item]]) -> list[Item]:
    """One order of all: the first one's, and what it lacks behind what came before it where it stands."""
    known: dict[Item, None] = dict.fromkeys(orders[0]) if orders else {}
    for order in orders[1:]:
        at_start: list[Item] = []
        followers: dict[Item, list[Item]] = {}
        here = at_start
        for item in order:
            if item in known:
                here = followers.setdefault(item, [])
            else:
                here.append(item)
        both = (one for item in known for one in (item, *followers.get(item, ())))
        # What has nothing in common with the rest came later.
        known = dict.fromkeys([*at_start, *both] if followers else [*known, *at_start])
    return list(known)


def named(frame: Frame) -> dict[str, Stat]:
    """The tensors of a call by name; a name that comes again is numbered."""
    found: dict[str, Stat] = {}
    for stat in frame.stats:
        name, again = stat.name, 1
        while name in found:
            again += 1
            name = f"{stat.name} #{again}"
        found[name] = stat
    return found


# ---------------------------------------------------------------- many ranks


def merged(ranks: Iterable[Iterable[Frame]]) -> list[Frame]:
    """The frames of one batch on several ranks as if one rank had had all samples."""
    by_rank = [keyed(frames) for frames in ranks]
    return [
        _merged([frames[key] for frames in by_rank if key in frames])
        for key in merged_order([list(frames) for frames in by_rank])
    ]


def _merged(frames: Sequence[Frame]) -> Frame:
    if len(frames) == 1:
        return frames[0]
    tables = [named(frame) for frame in frames]
    stats = [
        replace(_merged_stat([table[name] for table in tables if name in table]), name=name)
        for name in merged_order([list(table) for table in tables])
    ]
    return replace(frames[0], stats=tuple(stats))


def _merged_stat(stats: Sequence[Stat]) -> Stat:
    with_numbers = [stat for stat in stats if not stat.note]
    if not with_numbers:
        return stats[0]
    sizes = [math.prod(stat.shape) for stat in with_numbers]
    counted = [(stat.tiny, size) for stat, size in zip(with_numbers, sizes, strict=True) if stat.tiny is not None]
    total = sum(size for _, size in counted)
    return replace(
        with_numbers[0],
        abs_min=min(_numbers(stat.abs_min for stat in with_numbers), default=math.nan),
        abs_max=max(_numbers(stat.abs_max for stat in with_numbers), default=math.nan),
        nans=any(stat.nans for stat in with_numbers),
        infs=any(stat.infs for stat in with_numbers),
        tiny=sum(share * size for share, size in counted) / total if total else with_numbers[0].tiny,
    )


def _numbers(values: Iterable[float]) -> list[float]:
    """Without nan, which would be the smallest and the largest or not, as it comes first or last."""
    return [value for value in values if not math.isnan(value)]


# ---------------------------------------------------------------- batch by batch


class Source(Protocol):
    """The trace of one rank, as `lockstep.traces.read_trace.Trace` is."""

    @property
    def complete(self) -> bool:
        """Whether it was closed; known once all its batches were read."""
        ...

    def batches(self) -> Iterator[tuple[int, list[Frame]]]:
        """The frames of each batch, in order."""
        ...


@dataclass(frozen=True)
class RankBatchTrace:
    """What one rank has of a batch, and whether its trace was cut in it."""

    frames: list[Frame]
    cut: bool


Parts = dict[int | None, RankBatchTrace]


def by_batch(ranks: Mapping[int, Source]) -> Iterator[tuple[int, Parts]]:
    """Batch by batch, what each rank has of it; one batch of each rank is held, and the one after."""
    streams = {rank: source.batches() for rank, source in ranks.items()}
    ahead = {rank: next(stream, None) for rank, stream in streams.items()}
    while any(head is not None for head in ahead.values()):
        batch = min(head[0] for head in ahead.values() if head is not None)
        parts: Parts = {}
        for rank, head in ahead.items():
            if head is not None and head[0] == batch:
                ahead[rank] = next(streams[rank], None)
                parts[rank] = RankBatchTrace(head[1], ahead[rank] is None and not ranks[rank].complete)
        yield batch, parts
