"""Averaging gradients in one go, where no backward has done it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import tensors
from lockstep.errors import UsageError
from lockstep.process_group.group import Group
from lockstep.torch_internals.tensor import copy_all

_ALONE_BYTES = 1 << 20
"""Gradients from this size on travel as they are; smaller ones are packed together."""
_PACK_BYTES = 16 << 20


@torch.no_grad()
def average_gradients(group: Group, parameters: Sequence[Tensor]) -> None:
    """Called on: all ranks. Each gradient becomes the mean over the ranks; one that no rank has stays None.

    A rank that has none where others do counts as zero, as in DDP.
    """
    there = torch.tensor([parameter.grad is not None for parameter in parameters], device=group.device)
    anywhere = tensors.reduce(group, there, "sum").tolist()
    gradients = []
    for parameter, ranks in zip(parameters, anywhere, strict=True):
        if ranks and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            if parameter.grad.layout is not torch.strided:
                raise UsageError("auto_microbatch cannot average sparse gradients. Use sparse=False in the embedding.")
            gradients.append(parameter.grad)
    share = 1.0 / group.world_size
    group.check("averaging gradients")
    number = group.box.enter("averaging gradients", None, 3)
    try:
        for pack in _packs(gradients):
            flat = pack[0].mul_(share) if len(pack) == 1 else torch.cat([item.reshape(-1) for item in pack]).mul_(share)
            group.wait(group.backends[flat.device].allreduce([flat], dist.AllreduceOptions()), "averaging gradients")
            if len(pack) > 1:
                pieces = flat.split([item.numel() for item in pack])
                copy_all(pack, [piece.view_as(item) for piece, item in zip(pieces, pack, strict=True)])
    finally:
        group.box.leave(number)


def _packs(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients that travel together: all of one type, and not too much at once."""
    packs: dict[torch.dtype, list[Tensor]] = {}
    sizes: dict[torch.dtype, int] = {}
    for item in gradients:
        size = item.numel() * item.element_size()
        if size >= _ALONE_BYTES and item.is_contiguous():
            yield [item]
            continue
        packs.setdefault(item.dtype, []).append(item)
        sizes[item.dtype] = sizes.get(item.dtype, 0) + size
        if sizes[item.dtype] >= _PACK_BYTES:
            yield packs.pop(item.dtype)
            sizes[item.dtype] = 0
    yield from packs.values()
