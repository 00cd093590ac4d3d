"""Are replicas still replicas? A checksum of each parameter, and what differs between those of several ranks.

A weighted sum of a tensor's bits, eight bytes at a time, is the same on ranks whose values are the same; values that
changed places or signs change it too.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.raw_bytes import as_bytes
from lockstep.rundir.format_ranks import name_ranks

_HEADER = struct.Struct("<QI")
_SHOWN = 3
"""Parameters that are named."""
_CHUNK = 1 << 16
"""Words that are looked at at a time: what is made of them stays in the cache, or takes little of a device."""
_MIX = 0x1E3779B97F4A7C15
"""An odd number with many bits."""
_LOW = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class Checksums:
    """The parameters of one rank at one moment."""

    steps: int
    """Optimizer steps made so far."""
    sums: tuple[int, ...]
    """One of each parameter, in the order of their names."""

    def pack(self) -> bytes:
        """For other ranks."""
        return _HEADER.pack(self.steps, len(self.sums)) + struct.pack(f"<{len(self.sums)}Q", *self.sums)

    @classmethod
    def unpack(cls, data: bytes) -> Checksums | None:
        """The same again; None when it is nothing of the kind."""
        if len(data) < _HEADER.size:
            return None
        steps, count = _HEADER.unpack_from(data)
        if len(data) != _HEADER.size + 8 * count:
            return None
        return cls(steps=steps, sums=struct.unpack_from(f"<{count}Q", data, _HEADER.size))


def checksums(steps: int, parameters: Iterable[Tensor]) -> Checksums:
    """Those of these parameters now."""
    weights: dict[torch.device, Tensor] = {}
    found = []
    for parameter in parameters:
        if parameter.device not in weights:
            weights[parameter.device] = _fold(_MIX * torch.arange(1, _CHUNK + 1, device=parameter.device)) | 1
        found.append(_bits(parameter.detach(), weights[parameter.device]))
    if not found:
        return Checksums(steps=steps, sums=())
    return Checksums(steps=steps, sums=tuple(value % (1 << 64) for value in torch.stack(found).tolist()))


def _bits(values: Tensor, weights: Tensor) -> Tensor:
    """The checksum of a tensor, as a tensor that is still where the values are."""
    flat = values.to_dense() if values.is_sparse else values
    data = as_bytes(flat.contiguous())
    whole = data.numel() // 8 * 8
    head = data[:whole]
    if head.storage_offset() % 8:
        head = head.clone()
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for part in (*head.view(torch.int64).split(_CHUNK), data[whole:].long()):
        total = _MIX * total + _fold(part).mul_(weights[: part.numel()]).sum()
    return total


def _fold(words: Tensor) -> Tensor:
    """The words with their high bits in the low ones too: sums lose what overflows, and signs are the highest bits."""
    return (words >> 33).bitwise_and_(_LOW).bitwise_xor_(words)


def label(names: Sequence[str]) -> str:
    """A short name for these parameters."""
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()


def difference(of_ranks: Mapping[int, Checksums], names: Sequence[str]) -> str | None:
    """Which ranks have other values in which parameters, in words; None when all have the same."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(of_ranks):
        groups.setdefault(of_ranks[rank].sums, []).append(rank)
    if len(groups) < 2:
        return None
    usual = max(groups, key=lambda sums: (len(groups[sums]), -groups[sums][0]))
    odd = [rank for sums, ranks in groups.items() if sums != usual for rank in ranks]
    differing = [
        name
        for place, name in enumerate(names)
        if len({sums[place] if place < len(sums) else None for sums in groups}) > 1
    ]
    shown = ", ".join(differing[:_SHOWN]) + (f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else "")
    have = "has" if len(odd) == 1 else "have"
    return f"{name_ranks(sorted(odd))} {have} other values than {name_ranks(groups[usual])} in {shown}"
