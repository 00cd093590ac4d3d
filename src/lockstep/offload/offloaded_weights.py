"""Weights that are kept in memory or on disk until a module needs them, as mappings from names to tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError, ConfigError
from lockstep.model_files.offload_folder import INDEX, OffloadFolder, describe, read_index, weight_file, write_index
from lockstep.model_files.safetensors_file import raw
from lockstep.model_files.shared_tensors import tied_names
from lockstep.offload.disk_weight import DiskWeight, open_weight
from lockstep.offload.read_ahead import ReadAhead

_Folder = str | os.PathLike[str]


def offload_state_dict(save_dir: _Folder, state_dict: Mapping[str, Tensor]) -> None:
    """Write all tensors of a state dict into a folder, tied ones once; all of them, or nothing if that fails."""
    tied = tied_names(state_dict)
    surplus = {name for names in tied for name in names[1:]}
    with OffloadFolder(Path(save_dir)) as folder:
        for name, value in state_dict.items():
            if name not in surplus:
                folder.write(name, value)
        for names in tied:
            folder.tie(names)


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: _Folder, index: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Write one weight, and enter it into ``index``, which ``save_offload_index`` writes."""
    path = weight_file(Path(offload_folder), weight_name)
    path.write_bytes(raw(weight) if weight.numel() else b"")
    if index is not None:
        index[weight_name] = describe(weight)
    return index


def load_offloaded_weight(weight_file: _Folder, weight_info: Mapping[str, Any]) -> Tensor:
    """The weight in a file, of which the index says this."""
    path = Path(weight_file)
    return open_weight(path.name.removesuffix(".dat"), dict(weight_info), path.parent).read()


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: _Folder) -> None:
    """Write the index of a folder; what it said of other weights stays."""
    if index:
        write_index(Path(offload_folder), read_index(Path(offload_folder)) | dict(index))


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: Sequence[str]
) -> dict[str, Tensor]:
    """The part of a state dict that lies under these names."""
    heads = tuple(f"{name}." if name else "" for name in submodule_names)
    return {key: value for key, value in state_dict.items() if key in submodule_names or key.startswith(heads)}


class PrefixedDataset(Mapping[str, Any]):
    """Another mapping, of which the keys begin with a prefix that is left out here."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Weights of a state dict in memory, and of a folder or an index on disk. Those on disk are read ahead.

    Args:
        state_dict: Weights in memory; they come first.
        save_folder: A folder that ``offload_state_dict`` wrote.
        index: What is on disk, where it is not what the folder's own index says.
        device: Where weights on disk are put; the CPU by default.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: _Folder | None = None,
        index: Mapping[str, Any] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigError(
                "OffloadedWeightsLoader needs weights: a state_dict, a save_folder that they were offloaded to, or an "
                "index that says where they are."
            )
        folder = None if save_folder is None else Path(save_folder)
        if index is None and folder is not None:
            index = read_index(folder)
            if not index:
                raise CheckpointError(
                    f"There is no {folder / INDEX}, or nothing in it: no weights were offloaded there."
                )
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder, self.index, self.device = save_folder, dict(index or {}), device
        self._disk = {name: open_weight(name, entry, folder) for name, entry in self.index.items()}
        self._ahead = ReadAhead(self._disk)
        self.all_keys = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]

    @property
    def on_disk(self) -> Mapping[str, DiskWeight]:
        """The weights that are on disk."""
        return self._disk

    def add_names(self, names: Mapping[str, str]) -> None:
        """Let weights be found under further names: those that tie them."""
        for name, known in names.items():
            if name not in self and known in self._disk:
                self._disk[name] = self._disk[known]
                self.index[name] = self.index[known]
                self.all_keys.append(name)

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._ahead.close()

    def __enter__(self) -> OffloadedWeightsLoader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        if key not in self._disk:
            raise KeyError(key)
        value = self._ahead.fetch(key)
        entry = self.index[key]
        dtype = (
            getattr(torch, str(entry["dtype"]), value.dtype)
            if "safetensors_file" in entry and "dtype" in entry
            else value.dtype
        )
        return value.to(self.device, dtype) if self.device is not None or dtype != value.dtype else value

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self._disk

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)
