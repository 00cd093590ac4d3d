"""Files of a model and of single objects: one rank writes, and needs no other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep import current
from lockstep.config.sizes import shard_size
from lockstep.errors import CheckpointError
from lockstep.host.atomic_file import replacing
from lockstep.logging import get_notices
from lockstep.model_files import safetensors_file, weights
from lockstep.model_files.shared_tensors import clean_state_dict_for_safetensors, tied_names
from lockstep.model_files.writer import PLAIN, DiskSink
from lockstep.storage import commit, state_weights
from lockstep.storage.disk import Disk


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object to a file in the main process, or in the first of each machine; others do nothing.

    With ``safe_serialization`` it is a state dict, and is written in the safetensors format; else by ``torch.save``.
    """
    topology = current.require().topology
    if topology.is_local_main if save_on_each_node else topology.is_main:
        save_object(obj, f, safe_serialization)


def save_object(obj: Any, f: Any, safe_serialization: bool) -> None:
    """Write the object. A path gets its file when that is complete, and keeps the one it had until then."""
    if not isinstance(f, (str, os.PathLike)):
        _write(obj, f, safe_serialization)
        return
    with replacing(f) as draft, PLAIN.open(Path(draft)) as file:
        _write(obj, file, safe_serialization)


def _write(obj: Any, file: Any, safe_serialization: bool) -> None:
    if not safe_serialization:
        torch.save(obj, file)
        return
    if not isinstance(obj, Mapping):
        raise CheckpointError(
            f"safe_serialization=True writes state dicts: tensors by name. This is a {type(obj).__name__}."
        )
    for kept, *others in tied_names(obj):
        get_notices("lockstep.checkpoint").warning(
            f"save: {', '.join(others)} and {kept} are the same tensor, and a safetensors file has it under one name: "
            f"{kept}. A model that ties them gets it back; for another one, save clones."
        )
    safetensors_file.write_to(clean_state_dict_for_safetensors(obj), file)


_WAIT = 60.0
"""Seconds to wait for another writer: a state that is saved there in the background, the first rank of another node."""


def replace_model(
    state: Mapping[str, Any],
    folder: Path,
    max_shard_size: int | str = "10GB",
    safe: bool = True,
    *,
    durable: bool = True,
    disk: Disk | None = None,
) -> list[str]:
    """Write model files into a folder that may hold older ones; these are replaced when all new ones are complete.

    Those of a state that was saved there are kept: both can be loaded.
    """
    disk = disk or Disk()
    folder = Path(os.path.abspath(folder))
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; save_directory has to be a folder, or not to exist.")
    staging = commit.Staging(folder, disk, durable=durable, wait=_WAIT)
    try:
        sink = DiskSink(disk, durable=durable)
        names = weights.write_weights(state, staging.folder, max_shard_size=max_shard_size, safe=safe, sink=sink)
        if staging.exists:
            state_weights.set_aside(folder, disk, durable=durable)
        problem = staging.publish()
    finally:
        staging.close()
    if problem is not None:
        raise CheckpointError(commit.unfinished(f"The model in {folder}", problem))
    return names


def save_model(
    state: Mapping[str, Any], folder: Path, max_shard_size: int | str, safe: bool, *, durable: bool, here: bool
) -> None:
    """Write a model's files, on the ranks that do; arguments that cannot be right are refused on all."""
    size = shard_size(max_shard_size)
    weights.refuse_meta(state)
    if not here:
        return
    try:
        replace_model(state, folder, size, safe, durable=durable)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"The model was not saved to {folder} ({type(error).__name__}: {error}).") from error
