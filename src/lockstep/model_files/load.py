"""Loading model files into a model, however they are divided and wherever its parts are to go.

Tensors are read one by one into the place that they stay in: besides the model there is never more in memory than one
of them, or for torch's own format one mapped file.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep import current
from lockstep.errors import CheckpointError, ConfigError, NotYetError
from lockstep.logging import get_logger
from lockstep.model_files.broadcast_load import all_or_none, from_rank_0
from lockstep.model_files.device_map import Placing, as_dtype
from lockstep.model_files.offload_folder import OffloadFolder
from lockstep.model_files.shared_tensors import tied_names
from lockstep.model_files.state_loader import Assignment, NameDifferences
from lockstep.model_files.tensor_entry import some
from lockstep.model_files.weights import Weights, open_weights
from lockstep.storage.commit import pending_file
from lockstep.strategies.unwrap import inner_model


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> NameDifferences:
    """Load weights into a model, in place. Whatever does not fit raises before the first weight is changed.

    Args:
        model: May be on the meta device, in whole or in part, and may be prepared.
        checkpoint: A file with a state dict, the index of one that is divided, or the folder they are in.
        device_map: Where each part goes, by the name of its module: a device, or ``"disk"``. Without it, weights stay
            on the device they are on, and those on meta go to the CPU.
        offload_folder: Where weights go whose place is ``"disk"``; they are on the meta device afterwards.
        dtype: What floating-point weights become; without it they keep the model's dtype.
        offload_state_dict: Makes no difference: no state dict is ever held in memory.
        offload_buffers: Whether buffers of parts on disk go there too.
        keep_in_fp32_modules: Parts that become float32 where ``dtype`` would make them something else.
        offload_8bit_bnb: Not there yet.
        strict: Whether names that one of the two does not have are an error; else they are a warning.
        full_state_dict: Makes no difference: models here are not divided between processes.
        broadcast_from_rank0: Only rank 0 reads, and sends to the others. All ranks have to call it then.
    """
    if offload_8bit_bnb:
        raise NotYetError("offload_8bit_bnb=True: this release does not load 8-bit weights. Leave it out.")
    model, path = inner_model(model), Path(checkpoint)
    placing = Placing(model, device_map, as_dtype(dtype), keep_in_fp32_modules or (), offload_buffers)
    if placing.uses_disk and offload_folder is None:
        raise ConfigError('device_map puts a part on "disk", and there is no offload_folder to keep it in. Give one.')
    opened = functools.partial(_open, path)
    group = current.require().group if broadcast_from_rank0 else None
    if group is None or group.world_size == 1:
        with opened() as weights:
            return _load(*_planned(model, weights, path, strict, placing, offload_folder), path)
    with from_rank_0(group, opened) as weights:
        plan = functools.partial(_planned, model, weights, path, strict, placing, offload_folder)
        assignment, folder = all_or_none(group, plan)
        return _load(assignment, folder, path)


def _open(path: Path) -> Any:
    if not path.exists() and not pending_file(path).exists():
        raise CheckpointError(f"There is no {path} to load from: no file, index or folder of that name.")
    return open_weights(path)


def _planned(
    model: nn.Module, weights: Weights, path: Path, strict: bool, placing: Placing, offload_folder: Any
) -> tuple[Assignment, OffloadFolder | None]:
    folder = OffloadFolder(Path(offload_folder)) if placing.uses_disk else None
    offload = None if folder is None else folder.write
    entries, surplus = weights.entries, weights.surplus
    return Assignment(model, entries, strict, str(path), place=placing, offload=offload, surplus=surplus), folder


def _load(assignment: Assignment, folder: OffloadFolder | None, path: Path) -> NameDifferences:
    if folder is None:
        assignment.run()
    else:
        tied = tied_names(assignment.model.state_dict(keep_vars=True))

        def publish() -> None:
            for names in tied:
                folder.tie(names)
            folder.publish()

        with folder:
            assignment.run(publish)
    _log_differences(assignment.loaded, path)
    return assignment.loaded


def _log_differences(loaded: NameDifferences, path: Path) -> None:
    for names, what in (
        (loaded.missing_keys, "weights of the model are not in it and were left as they are"),
        (loaded.unexpected_keys, "of its weights are not in the model and were not used"),
    ):
        if names:
            get_logger(__name__).warning(f"{path}: {len(names)} {what}: {some(names, 10)}.")
