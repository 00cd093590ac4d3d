"""Saving a model from all ranks: one of them writes, all of them learn how it went."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import safe_file, weights
from lockstep.checkpoint.sharing import clean_state_dict_for_safetensors
from lockstep.checkpoint.sink import PLAIN
from lockstep.checkpoint.sizes import shard_size
from lockstep.comm.objects import all_objects
from lockstep.errors import CheckpointError
from lockstep.topology import current
from lockstep.topology.group import Group


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
    path = Path(f)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with PLAIN.open(beside) as file:
            _write(obj, file, safe_serialization)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _write(obj: Any, file: Any, safe_serialization: bool) -> None:
    if not safe_serialization:
        torch.save(obj, file)
        return
    if not isinstance(obj, Mapping):
        raise CheckpointError(
            f"safe_serialization=True writes state dicts: tensors by name. This is a {type(obj).__name__}."
        )
    safe_file.write_to(clean_state_dict_for_safetensors(obj), file)


def replace_model(
    state: Mapping[str, Any], folder: Path, max_shard_size: int | str = "10GB", safe: bool = True
) -> list[str]:
    """Write model files into a folder that may hold older ones; these are replaced when all new ones are complete."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; save_directory has to be a folder, or not to exist.")
    folder.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        names = weights.write_weights(state, beside, max_shard_size=max_shard_size, safe=safe)
        for name in names:
            (beside / name).replace(folder / name)
        for path in weights.stale(folder, names, safe=safe):
            path.unlink()
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return names


def save_from_one(
    group: Group, here: bool, state: Mapping[str, Any], folder: Path, max_shard_size: int | str, safe: bool
) -> None:
    """Called on: all ranks. Have one write the model's files; when it fails, all raise and name it."""
    size = shard_size(max_shard_size)
    weights.refuse_meta(state)
    only_here(group, here, lambda: replace_model(state, folder, size, safe), folder)


def only_here(group: Group, here: bool, action: Callable[[], object], target: Path) -> None:
    """Called on: all ranks. Have some of them do this; when it fails on one, all raise and name it."""
    error: Exception | None = None
    if here:
        try:
            action()
        except Exception as caught:
            error = caught
    told = None if error is None else f"{type(error).__name__}: {error}"
    outcomes = all_objects(group, told, "saving a model")
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text is not None]
    if failed:
        raise CheckpointError(f"The model was not saved to {target} ({'; '.join(failed)}).") from error
