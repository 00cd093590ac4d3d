"""Saving a model from all ranks: one of them writes, all of them learn how it went."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint import safe_file, weights
from lockstep.checkpoint.sharing import clean_state_dict_for_safetensors
from lockstep.checkpoint.sink import PLAIN
from lockstep.checkpoint.sizes import shard_size
from lockstep.checkpoint.wrappers import inner_model
from lockstep.comm.objects import all_objects
from lockstep.config.handlers import ProjectConfiguration
from lockstep.errors import CheckpointError
from lockstep.topology import current
from lockstep.topology.group import Group
from lockstep.topology.topology import Topology


class SavesModels:
    """What an accelerator does with the files of a model, each in one line."""

    _group: Group
    _topology: Topology
    project_configuration: ProjectConfiguration
    unwrap_model: Callable[..., nn.Module]

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Called on: all ranks. Write the model's weights for ``load_checkpoint_in_model`` and other tools.

        The main process writes, all wait for it, and all raise when it cannot. Files that are there already stay as
        they are until all new ones are complete; those of an earlier save that would be mixed up with them are removed.
        """
        state, size = self.get_state_dict(model), shard_size(max_shard_size)
        weights.refuse_meta(state)
        folder = Path(save_directory)
        only_here(self._group, self._writes(), lambda: replace_model(state, folder, size, safe_serialization), folder)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state dict, by default under the names it has without anything around it."""
        return inner_model(self.unwrap_model(model)).state_dict() if unwrap else model.state_dict()

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object to a file (a path or an open one) in the main process; others do nothing, and none waits."""
        if self._writes():
            save_object(obj, f, safe_serialization)

    def _writes(self) -> bool:
        each = self.project_configuration.save_on_each_node
        return self._topology.is_local_main if each else self._topology.is_main


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
