"""How many bytes each part of a model takes. Works on the meta device, too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.errors import ConfigError
from lockstep.torch_internals.module import children_of, tensor_tables, unsaved_buffers

Dtype = torch.dtype | str
Part = tuple[str, Any]
"""The name of a module, parameter or buffer, and the thing itself."""


def as_any_dtype(dtype: Dtype, name: str = "dtype") -> torch.dtype:
    """A dtype, also from its name."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"{name}={dtype!r} is not a dtype. Give one such as torch.float16 or 'bfloat16'.")
    return found


def dtype_byte_size(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return as_any_dtype(dtype).itemsize


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """A module's parameters, then its buffers, each tensor once."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        unsaved = get_non_persistent_buffers(module, recurse) if remove_non_persistent else ()
        yield from ((name, value) for name, value in module.named_buffers(recurse=recurse) if name not in unsaved)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of buffers that are not in the state dict: with ``fqns`` as seen from the module, else in their own."""
    parts = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    return {
        f"{path}.{name}" if path and (fqns or recurse) else name
        for path, part in parts
        for name in unsaved_buffers(part)
    }


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes below each name: of modules, parameters and buffers; ``""`` is the whole. Tied weights count once.

    Args:
        model: May be on the meta device.
        dtype: What floating-point weights are going to be, where that is narrower than what they are.
        special_dtypes: What single weights are going to be, by name.
        buffers_only: Count buffers only.
    """
    wanted = None if dtype is None else as_any_dtype(dtype)
    special = {name: as_any_dtype(value, f"special_dtypes[{name!r}]") for name, value in (special_dtypes or {}).items()}
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True):
        size = 0 if is_lazy(tensor) else tensor.numel() * _width(tensor.dtype, wanted, special.get(name))
        sizes[""] += size
        end = name.find(".")
        while end >= 0:
            sizes[name[:end]] += size
            end = name.find(".", end + 1)
        sizes[name] += size
    return sizes


def _width(now: torch.dtype, wanted: torch.dtype | None, special: torch.dtype | None) -> int:
    if special is not None:
        return special.itemsize
    converts = wanted is not None and (now.is_floating_point or now.is_complex)
    return min(wanted.itemsize, now.itemsize) if converts and wanted is not None else now.itemsize


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int:
    """Bytes of all buffers."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All children by name; one that is registered under two names is there twice, as in the state dict."""
    return [(name, child) for name, child in children_of(module).items() if child is not None]


def own_parts(module: nn.Module) -> list[Part]:
    """What a module consists of: its parameters, its children, its buffers, none of them looked into."""
    tensors, buffers = (
        [(name, value) for name, value in table.items() if value is not None] for table in tensor_tables(module)
    )
    return [*tensors, *children(module), *buffers]


def is_split(part: Any, no_split_module_classes: Sequence[str]) -> bool:
    """Whether a part may go to several devices, child by child."""
    return isinstance(part, nn.Module) and bool(children(part)) and type(part).__name__ not in no_split_module_classes


def get_max_layer_size(
    modules: Iterable[Part], module_sizes: Mapping[str, int], no_split_module_classes: Sequence[str]
) -> tuple[int, list[str]]:
    """The size of the largest layer in these parts, and the names of the layers of that size.

    A layer is what stays together: a module without children, or of a class that is not to be split.
    """
    most, names = 0, list[str]()
    waiting = list(modules)[::-1]
    while waiting:
        name, part = waiting.pop()
        if is_split(part, no_split_module_classes):
            waiting += [(f"{name}.{child}", value) for child, value in reversed(children(part))]
            continue
        size = module_sizes.get(name, 0)
        if size > most:
            most, names = size, []
        if size == most:
            names.append(name)
    return most, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the whole model, and its largest layer; models of transformers say themselves what is not split."""
    sizes = compute_module_sizes(model)
    whole = getattr(model, "_no_split_modules", None) or []
    return sizes[""], get_max_layer_size(own_parts(model), sizes, list(whole))
