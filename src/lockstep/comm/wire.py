"""Bytes from every rank: the one all-gather that tensors, objects and checks travel in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from lockstep.topology.group import Group


def all_gather_bytes(group: Group, result: Tensor, source: Tensor, doing: str = "gathering tensors") -> None:
    """Called on: all ranks. Every rank's ``source`` one after the other in ``result``; both flat, of one dtype.

    They are sent as bytes, so that any dtype can travel.
    """
    if source.dtype != torch.uint8:
        source, result = source.view(torch.uint8), result.view(torch.uint8)
    group.wait(group.pg._allgather_base(result, source, AllgatherOptions()), doing)


def gather_host(group: Group, source: Tensor, doing: str) -> Tensor:
    """Called on: all ranks. A small flat host tensor from every rank, one row each."""
    result = torch.empty((group.world_size, *source.shape), dtype=source.dtype)
    if group.world_size == 1:
        result[0] = source
    elif group.talks_host:
        all_gather_bytes(group, result.view(-1), source, doing)
    else:
        moved = torch.empty_like(result, device=group.device)
        all_gather_bytes(group, moved.view(-1), source.to(group.device), doing)
        result.copy_(moved)
    return result
