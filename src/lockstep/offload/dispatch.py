"""Models of which parts run on different devices, or wait on the host or on disk until they run."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError, UsageError
from lockstep.logging import get_logger
from lockstep.model_files.device_map import DISK, as_device, check_device_map, covering
from lockstep.model_files.load import load_checkpoint_in_model
from lockstep.model_files.offload_folder import check_covers
from lockstep.offload.align_devices import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from lockstep.offload.auto_device_map import infer_auto_device_map
from lockstep.offload.balanced_memory import get_balanced_memory
from lockstep.offload.hooks import MOVES, add_hook_to_module
from lockstep.offload.module_sizes import Dtype, own_parts
from lockstep.offload.offloaded_state import is_offloaded
from lockstep.offload.offloaded_weights import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    offload_state_dict,
)
from lockstep.offload.set_tensor import Place, TiedParams, owner_table, set_module_tensor_to_device
from lockstep.offload.tied_parameters import find_tied_parameters
from lockstep.torch_internals.module import device_of_move

_Folder = str | os.PathLike[str]
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def cpu_offload(
    model: nn.Module,
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights on the CPU, and bring those of each module to the device for its forward.

    Args:
        model: The model; it is changed in place.
        execution_device: Where forwards run; by default where the first parameter is.
        offload_buffers: Whether buffers are treated the same.
        state_dict: Values on the CPU to take instead of the model's own.
        preload_module_classes: Classes whose modules bring the weights of all modules inside at once: those that use
            them without calling the modules.
    """
    if state_dict is None:
        _refuse_empty(model, "cpu_offload")
        state_dict = _on_host(model.state_dict(keep_vars=True))
    return _offload(model, execution_device, state_dict, offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: _Folder,
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights in a folder, and bring those of each module to the device for its forward.

    Args:
        model: The model; it is changed in place. Weights on the meta device have to be in the folder already.
        offload_dir: The folder. What it holds is used where it equals the model's weights, and is replaced otherwise.
        execution_device: Where forwards run; by default where the first parameter is.
        offload_buffers: Whether buffers are treated the same.
        preload_module_classes: Classes whose modules bring the weights of all modules inside at once.
    """
    _write(model, model.state_dict(keep_vars=True), Path(offload_dir))
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    weights.add_names(_further_names(find_tied_parameters(model), weights))
    return _offload(model, execution_device, weights, offload_buffers, preload_module_classes)


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main_device: Place | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: _Folder | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Put each part of a model where a map says, and add the hooks that let it run there.

    Args:
        model: The model; it is changed in place.
        device_map: From names of modules to devices, ``"cpu"`` or ``"disk"``.
        main_device: Where parts on the CPU and on disk run; by default the first device in the map that is neither.
        state_dict: Values for the parts on the CPU, where they are not the model's own.
        offload_dir: Where the weights of parts on disk are, or are written.
        offload_index: Where each weight on disk is, in place of the folder's own index.
        offload_buffers: Whether buffers of those parts are offloaded as well.
        skip_keys: Keyword arguments that are not moved between devices.
        preload_module_classes: Classes whose modules bring the weights of all modules inside at once.
        force_hooks: Whether to add hooks also if there is one device only.
    """
    check_device_map(model, device_map)
    places = {name: as_device(name, place) for name, place in device_map.items()}
    devices = {str(place) for place in places.values()}
    if len(devices) == 1 and DISK not in devices and not force_hooks:
        model.to(next(iter(places.values())))
    else:
        main = _main_device(places) if main_device is None else torch.device(main_device)
        places = _refined(model, places)
        weights = _weights(model, places, main, state_dict, offload_dir, offload_index)
        _attach(model, places, main, weights, offload_buffers, skip_keys, preload_module_classes)
        _refuse_moves(model)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: _Folder,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    offload_folder: _Folder | None = None,
    offload_buffers: bool = False,
    dtype: Dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load model files into a model, each weight where a map says, and add the hooks that let it run there.

    Args:
        model: The model, best one made under ``init_empty_weights``.
        checkpoint: A file, an index of shards, or the folder that they are in.
        device_map: Where each part goes, or how to find out: ``"auto"`` and ``"balanced"`` (evenly over accelerators),
            ``"balanced_low_0"`` (as little as possible on the first), ``"sequential"`` (one after the other). Without
            it, weights are loaded and nothing else is done.
        max_memory: Limits for that.
        no_split_module_classes: Classes whose modules stay on one device.
        offload_folder: Where weights go whose place is ``"disk"``.
        offload_buffers: Whether buffers of offloaded parts are offloaded as well.
        dtype: What floating-point weights become.
        offload_state_dict: Makes no difference: no state dict is ever held in memory.
        skip_keys: Keyword arguments that are not moved between devices.
        preload_module_classes: Classes whose modules bring the weights of all modules inside at once.
        force_hooks: Whether to add hooks also if there is one device only.
        strict: Whether names that the files or the model alone have are an error; else they are a warning.
        full_state_dict: Makes no difference: models here are not divided between processes.
        broadcast_from_rank0: Only rank 0 reads, and sends to the others. All ranks have to call it then.
    """
    if isinstance(device_map, str):
        if device_map not in _AUTOMATIC:
            raise ConfigError(
                f"device_map={device_map!r} is not known. Give a table from names of modules to devices, or one of "
                f"{', '.join(map(repr, _AUTOMATIC))}."
            )
        if device_map != "sequential":
            low = device_map == "balanced_low_0"
            max_memory = get_balanced_memory(model, max_memory, no_split_module_classes, dtype, low_zero=low)
        device_map = infer_auto_device_map(
            model, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


# ---------------------------------------------------------------- where the values are


def _refined(model: nn.Module, places: Mapping[str, Any]) -> dict[str, Any]:
    """The map with no entry inside another one: one that has exceptions is replaced by those of its parts."""
    found: dict[str, Any] = {}
    waiting = list(places.items())[::-1]
    while waiting:
        name, place = waiting.pop()
        prefix = f"{name}." if name else ""
        if not any(key != name and key.startswith(prefix) for key in places):
            found[name] = place
            continue
        parts = [f"{prefix}{part}" for part, _ in own_parts(model.get_submodule(name))]
        waiting += [(part, place) for part in reversed(parts) if part not in places]
    return found


def _main_device(places: Mapping[str, Any]) -> torch.device:
    return next((place for place in places.values() if place != DISK and place.type != "cpu"), torch.device("cpu"))


def _weights(
    model: nn.Module,
    places: Mapping[str, Any],
    main: torch.device,
    state_dict: Mapping[str, Tensor] | None,
    folder: _Folder | None,
    index: Mapping[str, Any] | None,
) -> OffloadedWeightsLoader | None:
    """The values of the parts that are offloaded; on disk they are written where they are not there yet."""
    state = model.state_dict(keep_vars=True)
    on_disk = [name for name in state if places[covering(name, places)] == DISK]
    if on_disk and index is None:
        if folder is None:
            parts = ", ".join(repr(name) for name, place in places.items() if place == DISK)
            raise ConfigError(
                f'device_map puts {parts} on "disk", and there is no offload_dir to keep it in. Give one.'
            )
        _write(model, {name: state[name] for name in on_disk}, Path(folder))
    if state_dict is None and main.type != "cpu":
        on_host = [name for name, place in places.items() if isinstance(place, torch.device) and place.type == "cpu"]
        taken = extract_submodules_state_dict(state, on_host)
        state_dict = _on_host({name: value for name, value in taken.items() if not value.is_meta}) if on_host else None
    if state_dict is None and not on_disk and index is None:
        return None
    return OffloadedWeightsLoader(state_dict, folder if on_disk else None, index)


def _on_host(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """On the CPU; what is one tensor stays one."""
    moved: dict[int, Tensor] = {}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: moved.setdefault(id(value), value.detach().to("cpu")) for name, value in tensors.items()}


def _write(model: nn.Module, state: Mapping[str, Any], folder: Path) -> None:
    """Keep weights on disk. Those without values have to be there."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    values = {name: value for name, value in tensors.items() if not value.is_meta}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    empty = {name: value for name, value in tensors.items() if value.is_meta and name in parameters}
    if empty:
        check_covers(folder, empty, find_tied_parameters(model))
    if values:
        offload_state_dict(folder, values)


def _further_names(tied: Sequence[Sequence[str]], weights: Mapping[str, Tensor]) -> dict[str, str]:
    """For names that are not kept, the ones under which the same weight is."""
    kept = ((names, next((name for name in names if name in weights), None)) for names in tied)
    return {name: first for names, first in kept if first is not None for name in names if name not in weights}


def _refuse_empty(model: nn.Module, where: str) -> None:
    empty = [name for name, value in model.state_dict(keep_vars=True).items() if value.is_meta]
    if empty:
        raise UsageError(
            f"{where}: {len(empty)} weights have no values (they are on the meta device), {empty[0]} among them. Load "
            "the model first, or pass state_dict=."
        )


# ---------------------------------------------------------------- hooks


def _offload(
    model: nn.Module,
    execution_device: Place | None,
    weights: Mapping[str, Tensor],
    offload_buffers: bool,
    preload_module_classes: list[str] | None,
) -> nn.Module:
    tied = find_tied_parameters(model)
    device = execution_device if execution_device is not None else _own_device(model)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        tied_params_map=_shared(weights, tied),
    )
    _retie(model, tied)
    return model


def _own_device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


def _attach(
    model: nn.Module,
    places: Mapping[str, Any],
    main: torch.device,
    weights: OffloadedWeightsLoader | None,
    offload_buffers: bool,
    skip_keys: str | list[str] | None,
    preload_module_classes: list[str] | None,
) -> None:
    tied = find_tied_parameters(model)
    if weights is not None:
        weights.add_names(_further_names(tied, weights))
    waits = {name: place == DISK or (place.type == "cpu" and main.type != "cpu") for name, place in places.items()}
    runs = {name: main if waits[name] or place.type == "cpu" else place for name, place in places.items()}
    options: dict[str, Any] = {
        "weights_map": weights,
        "offload_buffers": offload_buffers,
        "skip_keys": skip_keys,
        "tied_params_map": _shared(weights or {}, tied) | _shared(dict(model.named_parameters()), tied),
    }
    modules = dict(model.named_modules(remove_duplicate=False))
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": main, **runs},
        offload={name: flag for name, flag in waits.items() if name in modules},
        preload_module_classes=preload_module_classes,
        **options,
    )
    for name in (name for name in places if name not in modules):  # a parameter or buffer that the map names itself
        _place_tensor(model, name, runs[name], options if waits[name] else None)
    _retie(model, tied)
    if any(waits.values()):
        where = " and ".join(sorted({str(places[name]) for name, flag in waits.items() if flag}))
        get_logger(__name__).info(f"Weights that wait on {where} until they run are on the meta device meanwhile.")


def _place_tensor(model: nn.Module, name: str, device: torch.device, offload: Mapping[str, Any] | None) -> None:
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    if offload is None:
        set_module_tensor_to_device(owner, attribute, device)
        return
    prefixed = PrefixedDataset(offload["weights_map"], f"{path}." if path else "")
    hook = AlignDevicesHook(device, offload=True, **{**offload, "weights_map": prefixed})
    hook.only = frozenset((attribute,))
    add_hook_to_module(owner, hook, append=True)


def _shared(weights: Mapping[str, Tensor], tied: Sequence[Sequence[str]]) -> TiedParams:
    """An entry for each tied weight in memory, by its address. On disk, the page cache has each one once."""
    held = weights.state_dict if isinstance(weights, OffloadedWeightsLoader) else weights
    found = [held[name] for names in tied for name in names if name in held]
    return {value.data_ptr(): {} for value in found if not value.is_meta}


def _retie(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Let what stands for one weight be one parameter again, where it is on one device."""
    for names in tied:
        owners = [owner_table(model, name) for name in names]
        first: dict[torch.device, Tensor] = {}
        for table, attribute in owners:
            value = table[attribute]
            table[attribute] = first.setdefault(value.device, value)


def _refuse_moves(model: nn.Module) -> None:
    for name in MOVES:
        move = getattr(model, name, None)
        if move is not None:
            setattr(model, name, functools.update_wrapper(functools.partial(_move, model, name, move), move))


def _move(model: nn.Module, name: str, move: Any, *args: Any, **kwargs: Any) -> Any:
    moves = name != "to" or device_of_move(*args, **kwargs) is not None
    if moves and is_offloaded(model):
        raise UsageError(
            "A model with offloaded parts cannot be moved. Load it with another device_map, or take the hooks off "
            "first (lockstep.hooks.remove_hook_from_submodules)."
        )
    if moves:
        get_logger(__name__).warning("A model that a device_map has dispatched is moved: its hooks move inputs back.")
    return move(*args, **kwargs)
