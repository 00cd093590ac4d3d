"""The numbers of a tensor in one pass: smallest and largest absolute value, NaN, infinity, and what underflowed.

A float's bits without the sign are ordered as its absolute value is, with infinity above all numbers and NaN above
that. So one reading of the bits as integers tells it all. Tensors are read in pieces that fit into the cache and are
never copied whole. On an accelerator nothing is waited for until ``fetch``, which gets all tensors' numbers at once.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.numerics.dtype_limits import range_of
from lockstep.numerics.process import this_process
from lockstep.torch_internals.tensor import sparse_values

CHUNK = 1 << 17
"""Elements read at a time on the CPU: as 4-byte integers half a megabyte, which stays in the second-level cache."""
DEVICE_CHUNK = 1 << 24
"""On an accelerator, where starting a kernel is what costs."""
NEVER, WHERE_SEEN, ALWAYS = 0, 1, 2
"""When to count what underflowed. That the smallest value is subnormal is free to know; wide dtypes need no more."""
nan, inf = math.nan, math.inf


class Numbers(NamedTuple):
    """What is known of one tensor."""

    abs_min: float
    abs_max: float
    nans: bool = False
    infs: bool = False
    tiny: float | None = None
    """Share of the values that are zero or subnormal; None when nobody counted."""
    subnormal: float | None = None
    """Share of the values that are subnormal."""
    note: str = ""
    """Said instead of numbers."""

    @property
    def bad(self) -> bool:
        """Whether there is a NaN or an infinity."""
        return self.nans or self.infs


def noted(note: str) -> Numbers:
    """Something that has no numbers."""
    return Numbers(nan, nan, note=note)


NONE = noted("None")
NOT_A_TENSOR = noted("not a tensor")


@dataclass(frozen=True)
class _Bits:
    """How to read a dtype's bits."""

    integer: torch.dtype
    mask: int
    infinity: int
    normal: int
    """The smallest normal number."""
    mantissa: int
    """How many bits of it."""
    values: Callable[[int, int], tuple[float, float]]
    """The numbers that two integers stand for; both at once, as this is called for each tensor."""
    mask_tensor: Tensor = field(init=False)
    """The mask as torch would make it of the number each time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask_tensor", torch.tensor(self.mask, dtype=self.integer, device="cpu"))


def _unpack(integer: str, real: str) -> Callable[[int, int], tuple[float, float]]:
    pack, unpack = struct.Struct(integer).pack, struct.Struct(real).unpack
    return lambda low, high: unpack(pack(low, high))


_wide = _unpack("<2i", "<2f")
_BITS = {
    torch.float32: _Bits(torch.int32, 0x7FFFFFFF, 0x7F800000, 0x00800000, 23, _wide),
    torch.bfloat16: _Bits(torch.int16, 0x7FFF, 0x7F80, 0x0080, 7, lambda low, high: _wide(low << 16, high << 16)),
    torch.float16: _Bits(torch.int16, 0x7FFF, 0x7C00, 0x0400, 10, _unpack("<2h", "<2e")),
    torch.float64: _Bits(torch.int64, (1 << 63) - 1, 0x7FF << 52, 1 << 52, 52, _unpack("<2q", "<2d")),
}
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.float64, torch.bool: torch.uint8}


class _Buffers(threading.local):
    """One piece of scratch memory for each thread: a backward may run in threads of its own."""

    def __init__(self) -> None:
        self.kept: dict[torch.dtype, Tensor] = {}

    def get(self, dtype: torch.dtype, size: int) -> Tensor:
        buffer = self.kept.get(dtype)
        if buffer is None:
            buffer = self.kept[dtype] = torch.empty(CHUNK, dtype=dtype, device="cpu")
        return buffer if size == CHUNK else buffer[:size]


_buffers = _Buffers()


# --- one tensor ------------------------------------------------------------------------------------------------------


def measure(tensor: Tensor, *, count: int = NEVER) -> Numbers | Pending:
    """The numbers of one tensor; on an accelerator a promise of them. ``count`` says when to count what underflowed.

    Never raises: what cannot be read is said in the note.
    """
    try:
        bits = _BITS.get(tensor.dtype)
        if bits is None or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_neg():
            return _uncommon(tensor, count)
        if tensor.is_cpu:
            return _on_host(tensor.detach(), bits, count)
        if tensor.is_meta:
            return _uncommon(tensor, count)
        return Pending.of(tensor.detach(), bits, count == ALWAYS)
    except Exception as error:  # a tensor type of the user's own may refuse anything; his run goes on
        return noted(f"unreadable {type(tensor).__name__}: {type(error).__name__}")


def _on_host(tensor: Tensor, bits: _Bits, count: int) -> Numbers:
    size = tensor.numel()
    if size == 0:
        return noted("empty")
    view = tensor.view(bits.integer)
    if size <= CHUNK:
        masked = view & bits.mask_tensor
        low, high = torch.aminmax(masked)
        lowest, highest = int(low.item()), int(high.item())
        if highest < bits.infinity and (not count or (count == WHERE_SEEN and not 0 < lowest < bits.normal)):
            return Numbers(*bits.values(lowest, highest))  # nearly always
        if count == ALWAYS or (count and 0 < lowest < bits.normal):
            return _numbers(tensor, bits, lowest, highest, size, *_counted(masked, bits, lowest))
        return _numbers(tensor, bits, lowest, highest, size, None, None)
    lowest, highest = bits.mask, 0
    size = zeros = normals = 0  # of what is read: of a row that is shown many times only one
    for piece in pieces(view, CHUNK):
        masked = _buffers.get(bits.integer, piece.numel()).view(piece.shape)
        torch.bitwise_and(piece, bits.mask, out=masked)
        size += piece.numel()
        low, high = torch.aminmax(masked)
        least, most = int(low.item()), int(high.item())
        lowest, highest = min(lowest, least), max(highest, most)
        if count == ALWAYS:
            more_zeros, more_normals = _counted(masked, bits, least)
            zeros, normals = zeros + more_zeros, normals + more_normals
    if count == WHERE_SEEN and 0 < lowest < bits.normal:
        return _on_host(tensor, bits, ALWAYS)
    counted = (zeros, normals) if count == ALWAYS else (None, None)
    return _numbers(tensor, bits, lowest, highest, size, *counted)


def _counted(masked: Tensor, bits: _Bits, lowest: int) -> tuple[int, int]:
    """How many zeros and how many normal numbers there are; overwrites the piece."""
    size = masked.numel()
    if lowest >= bits.normal:
        return 0, size
    zeros = 0 if lowest else size - int(torch.clamp(masked, max=1).sum(dtype=torch.int32))
    masked.bitwise_right_shift_(bits.mantissa)  # what is left is the exponent, 0 below the normal numbers
    return zeros, int(masked.clamp_(max=1).sum(dtype=torch.int32))


def _numbers(
    tensor: Tensor, bits: _Bits, lowest: int, highest: int, size: int, zeros: int | None, normals: int | None
) -> Numbers:
    tiny = None if normals is None else (size - normals) / size
    subnormal = None if normals is None or zeros is None else (size - normals - zeros) / size
    if highest < bits.infinity:
        return Numbers(*bits.values(lowest, highest), tiny=tiny, subnormal=subnormal)
    if highest == bits.infinity:
        return Numbers(bits.values(lowest, 0)[0], inf, infs=True, tiny=tiny, subnormal=subnormal)
    infs = any(bool(torch.isinf(piece).any()) for piece in pieces(tensor, CHUNK))
    return Numbers(nan, nan, nans=True, infs=infs, tiny=tiny, subnormal=subnormal)


def pieces(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Views that together hold every element, each once or oftener, none with more than ``size``."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(size)
        return
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:  # one row that is shown many times
            tensor = tensor.narrow(dim, 0, 1)
    yield from _rows(tensor, size)


def _rows(tensor: Tensor, size: int) -> Iterator[Tensor]:
    if tensor.numel() <= size:
        yield tensor
        return
    rows = max(1, size * tensor.shape[0] // tensor.numel())
    for part in tensor.split(rows):
        if part.numel() <= size:
            yield part
        else:
            yield from _rows(part[0], size)


# --- kinds that are seldom met ---------------------------------------------------------------------------------------


def _uncommon(tensor: Tensor, count: int) -> Numbers | Pending:
    if tensor.is_meta:
        return noted("on meta")
    if getattr(tensor, "to_local", None) is not None:
        return measure(tensor.to_local(), count=count)  # type: ignore[attr-defined]
    if tensor.is_nested:
        nested = tensor.detach().unbind()
        return _joined([measure(part, count=count) for part in nested], [part.numel() for part in nested])
    if tensor.layout is torch.sparse_coo:
        return measure(sparse_values(tensor.detach()), count=count)
    if tensor.layout is not torch.strided:
        return measure(tensor.detach().values(), count=count)
    if tensor.is_quantized:
        return noted("quantized")
    if tensor.numel() == 0:
        return noted("empty")
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return _integers(tensor)
    parts = list(pieces(tensor.detach(), CHUNK))
    return _joined([_cast(part, count) for part in parts], [part.numel() for part in parts])


def _cast(piece: Tensor, count: int) -> Numbers:
    """A piece of a dtype that has no reading of its own, by way of a wider one; complex numbers by their size."""
    limits = range_of(piece.dtype)
    if piece.dtype.is_complex:
        wide = (piece if piece.dtype is not torch.complex32 else piece.to(torch.complex64)).abs()
    else:
        wide = (piece if piece.dtype is torch.float64 else piece.to(torch.float32)).resolve_neg()
    found = _fetched(measure(wide))
    if not count or limits is None or found.note:
        return found
    size, sizes = wide.numel(), wide.abs()
    tiny = int((sizes < limits.smallest_normal).sum()) / size
    return found._replace(tiny=tiny, subnormal=tiny - int((sizes == 0).sum()) / size)


def _integers(tensor: Tensor) -> Numbers:
    low = high = smallest = None
    for piece in pieces(tensor, CHUNK if tensor.is_cpu else DEVICE_CHUNK):
        part = piece.to(_WIDER.get(piece.dtype, piece.dtype))
        least, most = (one.item() for one in torch.aminmax(part))
        near = least if least >= 0 else -most if most <= 0 else _least_size(part)
        low = least if low is None else min(low, least)
        high = most if high is None else max(high, most)
        smallest = near if smallest is None else min(smallest, near)
    if low is None or high is None or smallest is None:
        return noted("empty")
    return Numbers(float(smallest), float(max(abs(low), abs(high))))


def _least_size(part: Tensor) -> int:
    """The smallest absolute value; the lowest integer has no positive counterpart, so it is left out."""
    return int(part.clamp(min=-torch.iinfo(part.dtype).max).abs().min().item())


def _joined(parts: Sequence[Numbers | Pending], sizes: Sequence[int]) -> Numbers:
    """The numbers of a tensor from those of its parts."""
    found = fetch(parts)
    told = [(one, size) for one, size in zip(found, sizes, strict=True) if not one.note]
    if not told:
        return found[0] if found else noted("empty")
    total, nans = sum(size for _, size in told), any(one.nans for one, _ in told)
    counted = all(one.tiny is not None for one, _ in told)
    return Numbers(
        nan if nans else min(one.abs_min for one, _ in told),
        nan if nans else max(one.abs_max for one, _ in told),
        nans=nans,
        infs=any(one.infs for one, _ in told),
        tiny=sum((one.tiny or 0.0) * size for one, size in told) / total if counted else None,
        subnormal=sum((one.subnormal or 0.0) * size for one, size in told) / total if counted else None,
    )


# --- accelerators ----------------------------------------------------------------------------------------------------


class Pending:
    """Numbers that are still being computed on a device: lowest and highest bits, NaN, infinity, zeros, normals."""

    __slots__ = ("bits", "counted", "size", "values")

    def __init__(self, bits: _Bits, size: int, counted: bool, values: Tensor) -> None:
        self.bits, self.size, self.counted, self.values = bits, size, counted, values

    @classmethod
    def of(cls, tensor: Tensor, bits: _Bits, count: bool) -> Numbers | Pending:
        """Start computing."""
        if tensor.numel() == 0:
            return noted("empty")
        rows, size = [], 0
        for piece in pieces(tensor.view(bits.integer), DEVICE_CHUNK):
            masked = piece & bits.mask
            size += piece.numel()
            lowest, highest = torch.aminmax(masked)
            row = [lowest.long(), highest.long(), (masked == bits.infinity).any().long()]
            if count:
                row += [(masked == 0).sum(), (masked >= bits.normal).sum()]
            rows.append(torch.stack(row))
        return cls(bits, size, count, torch.stack(rows))

    def numbers(self, rows: Sequence[Sequence[int]]) -> Numbers:
        """The numbers, from the values as they came from the device."""
        lowest, highest = min(row[0] for row in rows), max(row[1] for row in rows)
        bits, size = self.bits, self.size
        tiny = subnormal = None
        if self.counted:
            zeros, normals = sum(row[3] for row in rows), sum(row[4] for row in rows)
            tiny, subnormal = (size - normals) / size, (size - normals - zeros) / size
        infs = any(row[2] for row in rows)
        if highest > bits.infinity:
            return Numbers(nan, nan, nans=True, infs=infs, tiny=tiny, subnormal=subnormal)
        low, high = bits.values(lowest, min(highest, bits.infinity))
        return Numbers(low, high, infs=infs, tiny=tiny, subnormal=subnormal)


def fetch(found: Sequence[Numbers | Pending]) -> list[Numbers]:
    """The numbers of several tensors, got from their device in one go."""
    waiting = [one for one in found if isinstance(one, Pending)]
    if not waiting:
        return list(found)  # type: ignore[arg-type]
    flat = torch.cat([one.values.flatten() for one in waiting]).tolist()
    answers: list[Any] = []
    for one in waiting:
        height, width = one.values.shape
        part, flat = flat[: height * width], flat[height * width :]
        answers.append(one.numbers([part[row * width : (row + 1) * width] for row in range(height)]))
    ready = iter(answers)
    return [next(ready) if isinstance(one, Pending) else one for one in found]


def _fetched(found: Numbers | Pending) -> Numbers:
    return fetch([found])[0]


# --- screens ---------------------------------------------------------------------------------------------------------


def sum_is_finite(tensor: Tensor) -> bool | None:
    """Whether all values are finite, told from their sum, four times as fast; None when the sum cannot tell."""
    try:
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.dtype not in _BITS:
            return None
        total = tensor.detach().sum(dtype=torch.float32 if tensor.dtype is torch.float16 else None)
        return True if math.isfinite(total.item()) else None
    except Exception:  # as in ``measure``
        return None


def is_mask(tensor: Tensor) -> bool:
    """Whether this is added to scores to hide some of them: nothing but zeros and negative infinities."""
    try:
        return all(bool(((piece == 0) | (piece == -inf)).all()) for piece in pieces(tensor.detach(), DEVICE_CHUNK))
    except Exception:  # as in ``measure``
        return False


def detect_overflow(var: Any, ctx: str) -> bool:
    """Whether a tensor holds NaN or infinite values; prints that ``ctx`` has them, and with several ranks on which."""
    if not isinstance(var, Tensor):
        return False
    found = _fetched(measure(var))
    place = this_process().name if found.bad else ""
    for what in ["nans"] * found.nans + ["infs"] * found.infs:
        print(f"{place}: {ctx} has {what}" if place else f"{ctx} has {what}")
    return found.bad
