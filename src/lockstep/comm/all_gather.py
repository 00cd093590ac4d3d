"""The one all-gather that tensors, objects and checks travel in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from lockstep.comm.raw_bytes import as_bytes
from lockstep.process_group.group import Group
from lockstep.torch_internals.c10d import all_gather_into

OPTIONS = AllgatherOptions()
CARRIED = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.float16))
"""Dtypes that every backend carries as they are; others are sent as bytes."""


def all_gather(group: Group, result: Tensor, source: Tensor, doing: str = "gathering tensors") -> None:
    """Called on: all ranks. Every rank's ``source`` one after the other in ``result``, both contiguous."""
    if source.dtype not in CARRIED:
        source, result = as_bytes(source), as_bytes(result)
    group.wait(all_gather_into(group.backends[source.device], result, source, OPTIONS), doing)


def gather_host(group: Group, source: Tensor, doing: str) -> Tensor:
    """Called on: all ranks. A small flat host tensor from every rank, one row each."""
    result = torch.empty((group.world_size, *source.shape), dtype=source.dtype)
    if group.world_size == 1:
        result[0] = source
    elif group.talks_host:
        all_gather(group, result.view(-1), source, doing)
    else:
        moved = torch.empty_like(result, device=group.device)
        all_gather(group, moved.view(-1), source.to(group.device), doing)
        result.copy_(moved)
    return result
