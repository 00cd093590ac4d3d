"""What went into and came out of a module call: each tensor with its name and its numbers, read once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.comm.trees import kind_of, parts
from lockstep.numerics import stats
from lockstep.numerics.dtype_limits import range_of
from lockstep.numerics.stats import Numbers, noted
from lockstep.torch_internals.tensor import version_of
from lockstep.traces.frames import Frame, Stat

_DEPTH = 6
"""Structures are looked into so deep; one that holds itself would have no end."""
_SMALL = 4096
"""Up to this size a weight's numbers cost no more than the sum that tells whether they are needed."""
_INPUTS = tuple(f"input[{place}]" for place in range(16))
_NARROW = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (limits := range_of(dtype)) and limits.narrow
)
_ALWAYS, _WHERE_SEEN = stats.ALWAYS, stats.WHERE_SEEN
Leaf = tuple[str, Any]


class Later:
    """The numbers of a weight, read when somebody asks: it will still be there."""

    __slots__ = ("_found", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = version_of(tensor)
        self._found: Numbers | None = None

    def numbers(self) -> Numbers:
        """As they are; a note when the weight has been changed since."""
        if self._found is None:
            tensor = self._tensor()
            if tensor is None or version_of(tensor) != self._version:
                self._found = noted("changed since")
            else:
                self._found = stats.fetch([stats.measure(tensor)])[0]
        return self._found


class FrameRow(NamedTuple):
    """One line of a frame."""

    name: str
    dtype: torch.dtype | None
    shape: Any
    numbers: Numbers | Later

    def stat(self) -> Stat:
        """As frames keep it."""
        found = self.numbers.numbers() if isinstance(self.numbers, Later) else self.numbers
        return Stat(
            name=self.name,
            dtype="" if self.dtype is None else str(self.dtype).removeprefix("torch."),
            shape=() if self.shape is None else tuple(int(size) for size in self.shape),
            abs_min=found.abs_min,
            abs_max=found.abs_max,
            nans=found.nans,
            infs=found.infs,
            tiny=found.tiny,
            note=found.note,
        )


class ModuleCall(NamedTuple):
    """One call of one module, as kept until somebody wants a ``Frame`` of it."""

    batch: int
    phase: str
    module: str
    kind: str
    call: int
    rows: list[FrameRow]

    def frame(self) -> Frame:
        """The frame, with numbers that were not read yet."""
        stats = tuple(row.stat() for row in self.rows)
        return Frame(
            batch=self.batch, phase=self.phase, module=self.module, kind=self.kind, call=self.call, stats=stats
        )


class TensorReader:
    """Reads tensors, each once as long as it is not changed: one module's output is the next one's input."""

    def __init__(self) -> None:
        self._memo: dict[int, tuple[weakref.ref[Tensor], int, Numbers]] = {}
        self._weights: dict[int, tuple[weakref.ref[Tensor], int, Numbers | Later]] = {}
        self.thorough = False
        """Whether numbers are read in full for a trace: those of weights at once, and what underflowed in any dtype."""
        self.half = False
        """Whether fp16 was met since this was last set to False."""

    def forget(self) -> None:
        """Forget the activations of the batch before."""
        self._memo.clear()
        self.half = False

    def read(self, leaves: Iterable[Leaf]) -> list[FrameRow]:
        """The rows of these tensors; on an accelerator all numbers are got in one go."""
        rows: list[FrameRow] = []
        waiting: list[tuple[int, Tensor]] = []
        memo, thorough = self._memo, self.thorough
        for name, value in leaves:
            if not isinstance(value, Tensor):
                rows.append(FrameRow(name, None, None, stats.NONE if value is None else stats.NOT_A_TENSOR))
                continue
            dtype = value.dtype
            known = memo.get(id(value))
            found: Any
            if (
                known is not None
                and known[0]() is value
                and known[1] == version_of(value) >= 0
                and (not thorough or known[2].tiny is not None)
            ):
                found = known[2]
            else:
                found = self._measure(value, dtype)
                if isinstance(found, Numbers):
                    found = self._remember(value, found)
                else:
                    waiting.append((len(rows), value))
            rows.append(FrameRow(name, dtype, value.shape, found))
        if waiting:
            fetched = stats.fetch([rows[place].numbers for place, _ in waiting])  # type: ignore[misc]
            for (place, value), numbers in zip(waiting, fetched, strict=True):
                rows[place] = rows[place]._replace(numbers=self._remember(value, numbers))
        return rows

    def gradient(self, name: str, tensor: Tensor) -> FrameRow:
        """The row of a gradient, which nobody will ask for again."""
        found = self._measure(tensor, tensor.dtype)
        if not isinstance(found, Numbers):
            (found,) = stats.fetch([found])
        return FrameRow(name, tensor.dtype, tensor.shape, found)

    def _measure(self, tensor: Tensor, dtype: torch.dtype) -> Numbers | stats.Pending:
        if dtype is torch.float16:
            self.half = True
        # Narrow dtypes lose values in ordinary training, others only where their smallest value shows it.
        return stats.measure(tensor, count=_ALWAYS if self.thorough or dtype in _NARROW else _WHERE_SEEN)

    def _remember(self, tensor: Tensor, found: Numbers) -> Numbers:
        if found.infs and not found.nans and stats.is_mask(tensor):
            found = found._replace(infs=False)
        self._memo[id(tensor)] = (weakref.ref(tensor), version_of(tensor), found)
        return found

    def weight(self, name: str, tensor: Tensor) -> FrameRow:
        """The row of a parameter: a look at whether it is finite, once for each of its versions."""
        known = self._weights.get(id(tensor))
        version = version_of(tensor)
        found: Any
        if known is not None and known[0]() is tensor and known[1] == version >= 0 and not self.thorough:
            found = known[2]
        else:
            if not self.thorough and tensor.numel() > _SMALL and stats.sum_is_finite(tensor):
                found = Later(tensor)
            else:
                found = stats.fetch([stats.measure(tensor, count=stats.ALWAYS if self.thorough else stats.NEVER)])[0]
            self._weights[id(tensor)] = (weakref.ref(tensor), version, found)
        return FrameRow(name, tensor.dtype, tensor.shape, found)


def inputs_of(args: Any, kwargs: Any) -> Iterator[Leaf]:
    """What a module was called with."""
    if isinstance(args, tuple):
        for place, value in enumerate(args):
            name = _INPUTS[place] if place < len(_INPUTS) else f"input[{place}]"
            if isinstance(value, Tensor) or value is None:
                yield name, value
            else:
                yield from leaves_of(name, value)
    else:
        yield from leaves_of("input", args)
    for key, value in kwargs.items() if kwargs else ():
        yield from leaves_of(f"input[{key!r}]", value)


def leaves_of(name: str, value: Any, depth: int = 0) -> Iterator[Leaf]:
    """The tensors of a structure with their places.

    Of a tuple or list every item is told, as there its place says what it is. Of mappings and dataclasses, which may
    carry any number of options along, only the tensors.
    """
    kind = kind_of(value)
    if kind in ("tensor", "leaf") or depth >= _DEPTH:
        yield name, value
        return
    keys, values = parts(value, kind)
    listed = isinstance(keys, int)
    told = False
    for key, item in zip(range(keys) if isinstance(keys, int) else keys, values, strict=True):
        place = f"{name}.{key}" if kind == "dataclass" else f"{name}[{key!r}]"
        for leaf in leaves_of(place, item, depth + 1):
            if listed or isinstance(leaf[1], Tensor):
                told = True
                yield leaf
    if not told:
        yield name, value
