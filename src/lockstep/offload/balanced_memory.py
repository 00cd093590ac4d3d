"""Limits under which a model is divided evenly between accelerators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from lockstep.offload.auto_device_map import as_classes
from lockstep.offload.module_sizes import Dtype, compute_module_sizes
from lockstep.topology.memory import get_max_memory

_SHARE = 0.9
"""Of the memory of the only accelerator: the rest is for activations."""
_SLACK = 1.25


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """A ``max_memory`` for ``infer_auto_device_map`` under which each accelerator gets about as much of the model.

    Args:
        model: May be on the meta device.
        max_memory: Limits that are kept; without it, what is free now.
        no_split_module_classes: Classes whose modules stay on one device.
        dtype: What the weights are going to be loaded as.
        special_dtypes: The same for single weights, by name.
        low_zero: Put as little as possible on accelerator 0, which does other work too (as in ``generate``).
    """
    limits = get_max_memory(max_memory)
    usable = [device for device, size in limits.items() if device not in ("cpu", "disk") and size > 0]
    if not usable or (usable == ["mps"] and not torch.backends.mps.is_available()):
        return limits
    numbered = [device for device in usable if isinstance(device, int)]
    low_zero = low_zero and len(usable) > 1 and 0 in limits
    if len(usable) == 1 and max_memory is None and numbered:
        limits[numbered[0]] = int(limits[numbered[0]] * _SHARE)
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    share = sizes.get("", 0) // (len(usable) - low_zero)
    share += int(_SLACK * max(_largest_whole(model, sizes, as_classes(no_split_module_classes)), _mean_layer(sizes)))
    for device in numbered[:-1]:  # the last one keeps its limit, for what the others could not take
        if not (low_zero and device == 0):
            limits[device] = min(share, limits[device])
    if low_zero:
        elsewhere = sum(limits[device] for device in numbered if device != 0)
        limits[0] = min(max(0, sizes.get("", 0) - elsewhere), limits[0])
    return limits


def _largest_whole(model: nn.Module, sizes: Mapping[str, int], classes: Sequence[str]) -> int:
    """Of the first module of each class that is not split, the size of the largest."""
    first: dict[str, int] = {}
    modules = dict(model.named_modules())
    for name, size in sizes.items():
        kind = type(modules[name]).__name__ if name in modules else ""
        if name and kind in classes:
            first.setdefault(kind, size)
    return max(first.values(), default=0)


def _mean_layer(sizes: Mapping[str, int]) -> int:
    """The mean size of modules that have tensors of their own and no modules below them."""
    modules = {name: size for name, size in sizes.items() if name not in _leaves(sizes)}
    layers = [modules[name] for name in _leaves(modules)]
    return int(sum(layers) / max(len(layers), 1))


def _leaves(names: Iterable[str]) -> set[str]:
    names = list(names)
    parents = {name.rpartition(".")[0] for name in names}
    return {name for name in names if name and name not in parents}
