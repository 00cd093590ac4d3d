"""Putting one parameter or buffer of a module onto a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError, NotYetError
from lockstep.model_files.state_loader import replacement
from lockstep.offload.module_sizes import Dtype, as_any_dtype
from lockstep.torch_internals.module import tensor_tables

Place = int | str | torch.device
TiedParams = dict[int, dict[Any, Tensor]]


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Place,
    value: Tensor | None = None,
    dtype: Dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedParams | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer onto a device, with other values where some are given.

    Args:
        module: The module, or one that it is in.
        tensor_name: Its name, with dots where it is further down.
        device: Where to.
        value: The new values; they become what the old ones were (a parameter, its dtype).
        dtype: What floating-point values become instead.
        fp16_statistics: Not there yet (8-bit weights).
        tied_params_map: By address of a tied weight, what each device has of it: that is used instead of a copy.
        non_blocking: Whether the copy may still be going on afterwards.
        clear_cache: Makes no difference: nothing is copied that would have to be cleared away.
    """
    if fp16_statistics is not None:
        raise NotYetError("fp16_statistics: this release does not load 8-bit weights. Leave it out.")
    table, attribute = owner_table(module, tensor_name)
    old = table[attribute]
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise ConfigError(f"{tensor_name} has no values (it is on the meta device): pass value= to put it on {device}.")
    if value is not None and value.shape != old.shape:
        raise ConfigError(
            f"{tensor_name} has shape {tuple(old.shape)}, and the given value {tuple(value.shape)}: they have to agree."
        )
    source = old if value is None else value
    wanted = source.dtype if value is None else old.dtype
    if dtype is not None and source.is_floating_point():
        wanted = as_any_dtype(dtype)
    table[attribute] = placed(old, source, device, wanted, tied_params_map, non_blocking)


def placed(
    old: Tensor,
    source: Tensor,
    device: Place,
    dtype: torch.dtype,
    tied: TiedParams | None = None,
    non_blocking: bool = False,
) -> Tensor:
    """``source`` on the device, as what ``old`` was; ``old`` itself where nothing changes."""
    known = None if tied is None or source.is_meta else tied.get(source.data_ptr())
    if known is not None and device in known:
        return known[device]
    with torch.no_grad():
        moved = source.detach().to(device, dtype, non_blocking=non_blocking)
    if source is old and moved.data_ptr() == old.data_ptr() and moved.device == old.device and moved.dtype == old.dtype:
        result = old
    else:
        result = replacement(old, moved)
    if known is not None:
        known[device] = result
    return result


def owner_table(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The table of a module that a parameter or buffer is in, and its name there."""
    path, _, attribute = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        owner = None
    for table in () if owner is None else tensor_tables(owner):
        if table.get(attribute) is not None:
            return table, attribute
    raise ConfigError(f"{type(module).__name__} has no parameter or buffer {name!r}.")
