"""The collectives as functions, for code that has no accelerator at hand: they look up this process's job."""

from __future__ import annotations

from typing import Any

from lockstep import current
from lockstep.comm import objects, tensors
from lockstep.comm.barrier import barrier


def gather(tensor: Any) -> Any:
    """Called on: all ranks. Each tensor of the structure from all ranks, joined along the first dimension."""
    return tensors.gather(current.require().group, tensor)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Called on: all ranks. Each tensor of the structure averaged over the ranks; or their "sum", or their "max"."""
    return tensors.reduce(current.require().group, tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Called on: all ranks. The sender's values in every rank's tensors."""
    return tensors.broadcast(current.require().group, tensor, from_process)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int | float = 0, pad_first: bool = False) -> Any:
    """Called on: all ranks. Each tensor padded to its largest size on any rank."""
    return tensors.pad_across_processes(current.require().group, tensor, dim, pad_index, pad_first)


def gather_object(object: Any) -> Any:
    """Called on: all ranks. The ranks' lists joined into one."""
    return objects.gather_object(current.require().group, object)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Called on: all ranks. The sender's objects in every rank's list."""
    return objects.broadcast_object_list(current.require().group, object_list, from_process)


def wait_for_everyone() -> None:
    """Called on: all ranks. Wait until every rank is here."""
    barrier(current.require().group)
