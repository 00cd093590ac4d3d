"""Where two traces part: two runs, two batches of one run, or two ranks of it. Pure: frames in, differences out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lockstep.rundir.format_ranks import number_ranks
from lockstep.traces.align import Key, Parts, RankBatchTrace, Source, by_batch, keyed, merged, merged_order, named
from lockstep.traces.frames import Frame, Stat
from lockstep.traces.tolerance import ABSOLUTE, COARSE, SHARE, Tolerance, is_parameter

BETWEEN_BATCHES = 0.5
"""Two batches hold other samples: what counts there is a number that halved or doubled."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor of one call that is not the same on both sides."""

    batch: int
    """The batch; of two batches, the first."""
    rank: int | None
    """The rank; None where all were taken together."""
    phase: str
    module: str
    kind: str
    call: int
    tensor: str
    what: str
    """ "nan", "inf", "abs max", "abs min", "shape", "underflow" or "note"."""
    first: Stat
    second: Stat
    relative: float
    """The difference as a share of the tensor's largest value."""
    tolerance: float


@dataclass(kw_only=True)
class Diff:
    """What came of a comparison."""

    differences: list[Difference] = field(default_factory=list)
    """Of the first batch in which numbers differ, in order of execution."""
    missing: dict[str, str] = field(default_factory=dict)
    """What only the first side has, and where it was first seen: modules, and tensors of modules that both have."""
    extra: dict[str, str] = field(default_factory=dict)
    """The same of the second side."""
    notes: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    tensors: int = 0

    @property
    def parted(self) -> bool:
        """Whether anything differs."""
        return bool(self.differences or self.missing or self.extra)


# ---------------------------------------------------------------- the three comparisons


def diff_runs(
    first: Mapping[int, Source],
    second: Mapping[int, Source],
    *,
    rtol: float | None = None,
    atol: float = ABSOLUTE,
    together: bool = False,
    parameters_only: bool = False,
) -> Diff:
    """Two runs, rank by rank, up to the first batch in which numbers differ.

    ``together``: the runs have not the same number of ranks. The ranks of each are taken as one, with the smallest and
    the largest value on any; the backward pass, whose numbers depend on how many samples a rank has, is left out.
    """
    found = Diff()
    keep = _Keep(phases=("forward", "optimizer") if together else (), parameters_only=parameters_only)
    ranks: list[int | None] = [None] if together else [*sorted(set(first) & set(second))]
    tolerances = {rank: Tolerance(rtol, atol) for rank in ranks}
    only: tuple[list[int], list[int]] = ([], [])
    for batch, left, right in _joined(by_batch(first), by_batch(second)):
        if left is None or right is None:
            only[0 if right is None else 1].append(batch)
            continue
        found.batches.append(batch)
        if together:
            left, right = _as_one(left), _as_one(right)
        for rank in ranks:
            if rank in left and rank in right:
                one, other = _cut_alike(left[rank], right[rank], f"batch {batch}", found)
                compare(keep(one), keep(other), tolerances[rank], found, rank=rank, shapes=not together)
        if found.differences:
            break
    for name, batches in zip(("first", "second"), only, strict=True):
        if batches:
            found.notes.append(
                f"Only the {name} has batch{'' if len(batches) == 1 else 'es'} {number_ranks(batches, 8)}."
            )
    return found


def diff_batches(
    first: tuple[int, Mapping[int, list[Frame]]],
    second: tuple[int, Mapping[int, list[Frame]]],
    *,
    rtol: float | None = None,
    atol: float = ABSOLUTE,
) -> Diff:
    """Two batches of one run, rank by rank; shapes may differ, the last batch of an epoch is often smaller."""
    found = Diff(batches=[first[0], second[0]])
    for rank in sorted(set(first[1]) & set(second[1])):
        tolerance = Tolerance(BETWEEN_BATCHES if rtol is None else rtol, atol)
        compare(first[1][rank], second[1][rank], tolerance, found, rank=rank, shapes=False)
    return found


def compare(
    first: Sequence[Frame], second: Sequence[Frame], tolerance: Tolerance, into: Diff, *, rank: int | None, shapes: bool
) -> None:
    """The frames of one batch of both sides, in order of execution; what differs goes ``into`` the diff."""
    left, right = keyed(first), keyed(second)
    batch = first[0].batch if first else second[0].batch if second else 0
    tolerance.begin(batch, (*first, *second))
    order = merged_order([list(left), list(right)])
    for key in order:
        one, other = left.get(key), right.get(key)
        if one is None or other is None:
            _only(one or other, into.missing if other is None else into.extra, "", rank)
            continue
        mine, theirs = named(one), named(other)
        for name in merged_order([list(mine), list(theirs)]):
            if name not in mine or name not in theirs:
                _only(one, into.missing if name in mine else into.extra, name, rank)
                continue
            into.tensors += 1
            allowed = tolerance.between(one, mine[name], theirs[name])
            differs = unlike(mine[name], theirs[name], allowed, tolerance.absolute, shapes=shapes)
            if differs is not None:
                into.differences.append(
                    Difference(
                        batch=batch,
                        rank=rank,
                        phase=one.phase,
                        module=one.module,
                        kind=one.kind,
                        call=one.call,
                        tensor=name,
                        what=differs[0],
                        first=mine[name],
                        second=theirs[name],
                        relative=differs[1],
                        tolerance=allowed,
                    )
                )
    swapped = _first_swap(left, right)
    if swapped is not None:
        note = f"The modules run in another order from {_module(swapped)} on (batch {batch}, {swapped.phase})."
        if not any(earlier.startswith("The modules run in another order") for earlier in into.notes):
            into.notes.append(note)


# ---------------------------------------------------------------- one tensor


def unlike(
    first: Stat, second: Stat, tolerance: float, absolute: float = ABSOLUTE, *, shapes: bool = True
) -> tuple[str, float] | None:
    """What differs most between two tensors and by how much; None when they are the same within the tolerance."""
    if first.note != second.note:
        return "note", math.inf
    if first.nans != second.nans:
        return "nan", math.inf
    if first.infs != second.infs:
        return "inf", math.inf
    if shapes and first.shape != second.shape:
        return "shape", math.inf
    if first.note:
        return None
    scale = max((size for size in (first.abs_max, second.abs_max) if math.isfinite(size)), default=0.0)
    for what, one, other in (
        ("abs max", first.abs_max, second.abs_max),
        ("abs min", first.abs_min, second.abs_min),
    ):
        apart = _apart(one, other)
        if what == "abs min" and tolerance >= COARSE:
            continue
        if apart > tolerance * scale + absolute:
            return what, apart / scale if scale and math.isfinite(apart) else math.inf
    if first.dtype == second.dtype and first.tiny is not None and second.tiny is not None:
        apart = _apart(first.tiny, second.tiny)
        if apart > max(SHARE, tolerance):
            return "underflow", apart
    return None


def _apart(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other)
    return apart if math.isfinite(apart) else math.inf


# ---------------------------------------------------------------- what only one side has, and where


def _first_swap(left: Mapping[Key, Frame], right: Mapping[Key, Frame]) -> Frame | None:
    """The first frame that comes at another place on the second side, of those that both have."""
    mine = [key for key in left if key in right]
    theirs = [key for key in right if key in left]
    return next((left[one] for one, other in zip(mine, theirs, strict=True) if one != other), None)


def _only(frame: Frame | None, into: dict[str, str], tensor: str, rank: int | None) -> None:
    if frame is not None:
        name = _module(frame) + (f", {tensor}" if tensor else "")
        where = f"batch {frame.batch}, {frame.phase}" + ("" if rank is None else f", rank {rank}")
        into.setdefault(name, where)


def _module(frame: Frame) -> str:
    called = f", call {frame.call}" if frame.call else ""
    return f"{frame.module or '(root)'} ({frame.kind}{called})"


# ---------------------------------------------------------------- streams


@dataclass(frozen=True)
class _Keep:
    """Which frames and tensors are compared."""

    phases: tuple[str, ...]
    parameters_only: bool

    def __call__(self, frames: Iterable[Frame]) -> list[Frame]:
        chosen = [frame for frame in frames if not self.phases or frame.phase in self.phases]
        if not self.parameters_only:
            return chosen
        lasting = (
            replace(frame, stats=tuple(stat for stat in frame.stats if is_parameter(frame, stat)))
            for frame in chosen
            if frame.phase == "forward"
        )
        return [frame for frame in lasting if frame.stats]


def _joined(
    first: Iterator[tuple[int, Parts]], second: Iterator[tuple[int, Parts]]
) -> Iterator[tuple[int, Parts | None, Parts | None]]:
    one, other = next(first, None), next(second, None)
    while one is not None or other is not None:
        if other is None or (one is not None and one[0] < other[0]):
            assert one is not None
            yield one[0], one[1], None
            one = next(first, None)
        elif one is None or other[0] < one[0]:
            yield other[0], None, other[1]
            other = next(second, None)
        else:
            yield one[0], one[1], other[1]
            one, other = next(first, None), next(second, None)


def _as_one(ranks: Mapping[int | None, RankBatchTrace]) -> Parts:
    parts = [part for _, part in sorted(ranks.items(), key=lambda item: item[0] or 0)]
    return {None: RankBatchTrace(merged([part.frames for part in parts]), any(part.cut for part in parts))}


def _cut_alike(left: RankBatchTrace, right: RankBatchTrace, where: str, into: Diff) -> tuple[list[Frame], list[Frame]]:
    """Both sides up to where a cut trace ends: what its process did not live to do is not missing."""
    if left.cut == right.cut:
        return left.frames, right.frames
    short, long = (left, right) if left.cut else (right, left)
    there = set(keyed(short.frames))
    last = max((place for place, key in enumerate(keyed(long.frames)) if key in there), default=-1)
    if last + 1 < len(long.frames):
        side = "first" if left.cut else "second"
        rest = len(long.frames) - last - 1
        into.notes.append(f"The {side} ends within {where}: {rest} calls of the other have no counterpart.")
    kept = long.frames[: last + 1]
    return (short.frames, kept) if left.cut else (kept, short.frames)
