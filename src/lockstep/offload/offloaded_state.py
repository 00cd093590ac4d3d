"""The whole state dict of a model of which parts are offloaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.offload.align_devices import has_offloaded_params, offloading_hook
from lockstep.offload.disk_weight import open_weight
from lockstep.offload.set_tensor import set_module_tensor_to_device
from lockstep.torch_internals.module import tensor_tables


def is_offloaded(model: nn.Module) -> bool:
    """Whether weights of some module in it are offloaded by a hook."""
    return any(has_offloaded_params(module) for module in model.modules())


def offloaded_values(model: nn.Module) -> dict[str, Tensor]:
    """The values of all offloaded weights by name; tied ones are one tensor. Those on disk are mapped, not copied."""
    by_slot: dict[tuple[int, str], Tensor] = {}
    by_weight: dict[int, Tensor] = {}
    for module in model.modules():
        hook = offloading_hook(module)
        for standing, table, attribute, value in () if hook is None else hook.values():
            by_slot[id(table), attribute] = by_weight.setdefault(id(standing), value)
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for table in tensor_tables(module):
            for attribute in table:
                if (id(table), attribute) in by_slot:
                    found[f"{path}.{attribute}" if path else attribute] = by_slot[id(table), attribute]
    return found


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """The model's state dict, with the values of what is offloaded."""
    state = model.state_dict()
    if is_offloaded(model):
        values = offloaded_values(model)
        state.update((name, values[name].to(value.dtype)) for name, value in list(state.items()) if name in values)
    return state


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """The state dict with the values of what is offloaded, all on the CPU; tied weights are one tensor."""
    moved: dict[int, Tensor] = {}

    def on_host(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type in ("cpu", "meta"):
            return value
        return moved.setdefault(id(value), value.cpu())

    return {name: on_host(value) for name, value in whole_state_dict(model).items()}


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Bring the weights of an index from a folder into the model, on the CPU."""
    for name, entry in (index or {}).items():
        set_module_tensor_to_device(model, name, "cpu", value=open_weight(name, entry, Path(offload_folder)).read())


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, Any]:
    """Fill ``state_dict`` with the offloaded weights of one module, under the names that they have in the model."""
    path = module_name.rpartition(".")[0]
    for name, value in offloaded_values(module).items():
        key = f"{path}.{name}" if path else name
        if key in state_dict:
            state_dict[key] = value.to(device_to_put_offload)
    return state_dict
