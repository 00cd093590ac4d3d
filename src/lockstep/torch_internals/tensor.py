"""Tensors and their storages."""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, by one call for all.

    Needs ``torch._foreach_copy_``; 2.9 to 2.13. Without it: ``copy_`` for each, some 2 us a tensor.
    """
    torch._foreach_copy_(targets, sources)


def scale_all(tensors: list[Tensor], factor: float) -> None:
    """Multiply each in place, by one call for all.

    Needs ``torch._foreach_mul_``; 2.9 to 2.13. Without it: ``mul_`` for each.
    """
    torch._foreach_mul_(tensors, factor)


def version_of(tensor: Tensor) -> int:
    """How often the tensor was changed in place; -1 where torch does not count.

    Needs ``Tensor._version``; 2.9 to 2.13. Without it: the numerics detector reads each tensor at each module again.
    """
    try:
        return tensor._version
    except RuntimeError:  # a tensor made in inference mode
        return -1


def sparse_values(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor as they lie there: putting them in order first would copy them.

    Needs ``Tensor._values``; 2.9 to 2.13. Without it: ``coalesce().values()``, and the memory for that copy.
    """
    return tensor._values()


def sparse_indices(tensor: Tensor) -> Tensor:
    """The indices of a sparse tensor as they lie there.

    Needs ``Tensor._indices``; 2.9 to 2.13. Without it: ``coalesce().indices()``.
    """
    return tensor._indices()


def storage_key(storage: UntypedStorage) -> int:
    """What two tensors have in common exactly if they share memory, also on the meta device.

    Needs ``UntypedStorage._cdata``; 2.9 to 2.13. Without it: tied weights on the meta device, which have no address,
    count twice in forecasts of memory.
    """
    return storage._cdata


def offset_in_file(storage: UntypedStorage) -> int | None:
    """Where in a file of ``torch.save`` the bytes of a storage begin that was loaded as fake; None when unknown.

    Needs ``UntypedStorage._checkpoint_offset``; 2.9 to 2.13. Without it: such files are read by one thread.
    """
    return getattr(storage, "_checkpoint_offset", None)
