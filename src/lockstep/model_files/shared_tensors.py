"""Tensors of a state dict that are the same memory under several names.

Only the *same view* counts as tied: such a tensor is stored once, and what is tied in the model stays tied when it is
loaded. Two different parts of one storage are different weights, and both are stored.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lockstep.torch_internals.tensor import sparse_values


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Device, address and size of a tensor's storage: equal for tensors that share it.

    Storages on the meta device have no address, so that those of one size look equal.
    """
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def view_key(tensor: Tensor) -> Hashable:
    """Equal for two tensors just when they are the same elements of the same memory, in the same order.

    Where there is no memory to compare (meta, sparse, lazy, without elements) it is the object itself that counts, so
    the key holds only while the tensor lives.
    """
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return *id_tensor_storage(tensor), *place


def stored_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor's values; for a sparse one of those that it has, for a lazy one none."""
    if is_lazy(tensor):
        return 0
    if tensor.layout == torch.strided:
        return tensor.nbytes
    values = sparse_values(tensor) if tensor.layout == torch.sparse_coo else tensor.values()
    return values.nbytes


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether some of its elements are one place in memory, as those of an expanded tensor are."""
    if is_lazy(tensor) or tensor.layout != torch.strided or not tensor.numel():
        return False
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach < tensor.numel()


def tied_names(tensors: Mapping[str, Any]) -> list[list[str]]:
    """The groups of names, two or more in each, that stand for one tensor."""
    groups: dict[Hashable, list[str]] = {}
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            groups.setdefault(view_key(value), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with each tied tensor under the first of its names only, and all tensors contiguous."""
    surplus = {name for names in tied_names(state_dict) for name in names[1:]}
    return {
        name: value.contiguous() if isinstance(value, Tensor) and value.layout == torch.strided else value
        for name, value in state_dict.items()
        if name not in surplus
    }
