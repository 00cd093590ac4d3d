"""Model files: the weights of one model in a folder, under the names that other tools know.

==================================  =====================================
safetensors                         torch
==================================  =====================================
model.safetensors                   pytorch_model.bin
model-00001-of-00003.safetensors    pytorch_model-00001-of-00003.bin
model.safetensors.index.json        pytorch_model.bin.index.json
==================================  =====================================
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.checkpoint import safe_file, shards, torch_file
from lockstep.checkpoint.assigning import Assignment, Loaded, load_into
from lockstep.checkpoint.safe_file import SafeFile
from lockstep.checkpoint.sharing import tied_names
from lockstep.checkpoint.sink import PLAIN, Sink
from lockstep.checkpoint.sizes import shard_size
from lockstep.checkpoint.stored import read_all, some
from lockstep.checkpoint.torch_file import TorchFile
from lockstep.errors import CheckpointError
from lockstep.logging import get_logger

__all__ = ["Loaded", "Weights", "load_into", "load_weights", "open_weights", "read_weights", "write_weights"]


@dataclass(frozen=True)
class Layout:
    """How one format names its files."""

    stem: str
    """What all names begin with."""
    suffix: str
    """What the names of files with tensors end with."""

    @property
    def whole(self) -> str:
        """The only file of a model that is not divided."""
        return self.stem + self.suffix

    @property
    def index(self) -> str:
        """The index of one that is."""
        return self.whole + ".index.json"

    def owns(self, name: str) -> bool:
        """Whether a file of that name belongs to a model saved like this."""
        shard = re.fullmatch(rf"{re.escape(self.stem)}-\d{{5,}}-of-\d{{5,}}{re.escape(self.suffix)}", name)
        return name in (self.whole, self.index) or shard is not None


def layout_of(stem: str, safe: bool) -> Layout:
    """The names of a model's files: those of torch's format begin with ``pytorch_``."""
    return Layout(stem, ".safetensors") if safe else Layout(f"pytorch_{stem}", ".bin")


# ---------------------------------------------------------------- writing


def write_weights(
    state_dict: Mapping[str, Any],
    folder: Path,
    *,
    max_shard_size: int | str = "10GB",
    safe: bool = True,
    stem: str = "model",
    sink: Sink = PLAIN,
) -> list[str]:
    """Write a state dict as model files into an existing folder, and give their names, the index last.

    A tensor under several names is written once: with safetensors under its first name, else under all of them.
    Files of an earlier save are overwritten or left; ``stale`` finds the latter.
    """
    largest = shard_size(max_shard_size)
    refuse_meta(state_dict)
    layout = layout_of(stem, safe)
    if safe:
        surplus = {name for names in tied_names(state_dict) for name in names[1:]}
        state_dict = {name: value for name, value in state_dict.items() if name not in surplus}
    plan = shards.plan(state_dict, largest, layout.stem, layout.suffix, together=not safe)
    write = safe_file.write if safe else torch_file.write
    for file, names in plan.files.items():
        write({name: state_dict[name] for name in names}, folder / file, sink)
    if not plan.sharded:
        return list(plan.files)
    with sink.open(folder / layout.index) as opened:
        opened.write(plan.index())
    return [*plan.files, layout.index]


def refuse_meta(state_dict: Mapping[str, Any]) -> None:
    """Raise when there are tensors that have a shape but no values."""
    empty = [name for name, value in state_dict.items() if isinstance(value, Tensor) and value.device.type == "meta"]
    if empty:
        raise CheckpointError(
            f"{len(empty)} of {len(state_dict)} tensors have no values: they are on the meta device ({some(empty)}). "
            "Parts that were offloaded or never loaded cannot be saved; load the whole model first."
        )


def stale(folder: Path, written: list[str], *, safe: bool, stem: str = "model") -> list[Path]:
    """Files of an earlier save in the same format, which a reader of the folder would take for a part of this one."""
    layout = layout_of(stem, safe)
    return [path for path in sorted(folder.iterdir()) if layout.owns(path.name) and path.name not in written]


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Weights:
    """Opened model files, of which the headers have been checked."""

    files: tuple[SafeFile | TorchFile, ...]
    """Each file once."""
    entries: dict[str, Any]
    """All tensors, by name, as they are stored."""
    surplus: tuple[str, ...] = ()
    """Names that a file holds and the index does not know."""

    def close(self) -> None:
        """Let go of the files."""
        for file in self.files:
            file.close()


@contextmanager
def open_weights(path: Path, stem: str = "model") -> Iterator[Weights]:
    """A model's files, for as long as the region lasts: a file, an index, or the folder that they are in."""
    found = _locate(path, stem) if path.is_dir() else path
    files: list[SafeFile | TorchFile] = []
    try:
        if found.suffix == ".json":
            yield _open_shards(found, files)
        else:
            files.append(_open(found))
            yield Weights(tuple(files), dict(files[0].entries))
    finally:
        for file in files:
            file.close()


def read_weights(folder: Path, stem: str = "model") -> dict[str, Any]:
    """The state dict in a folder's model files, mapped into memory: changes of it do not reach the files."""
    with open_weights(folder, stem) as weights:
        return read_all(weights.entries)


def load_weights(model: nn.Module, folder: Path, stem: str = "model", strict: bool = True) -> Loaded:
    """Load a folder's model files into a model: twice as fast as ``read_weights`` and ``load_into``, in less memory.

    Whoever has several models to load makes the ``Assignment`` of each first, and runs them when all fit.
    """
    with open_weights(folder, stem) as weights:
        assignment = Assignment(model, weights.entries, strict, str(folder), surplus=weights.surplus)
        assignment.run()
        return assignment.loaded


def _open(path: Path) -> SafeFile | TorchFile:
    return SafeFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def _open_shards(index: Path, files: list[SafeFile | TorchFile]) -> Weights:
    places = shards.read_index(index)
    entries: dict[str, Any] = {}
    surplus: list[str] = []
    for name in sorted(set(places.values())):
        if not (index.parent / name).exists():
            raise CheckpointError(f"{index.parent / name} is missing; {index.name} names it.")
        files.append(file := _open(index.parent / name))
        listed = {tensor for tensor, place in places.items() if place == name}
        if absent := sorted(listed - set(file.entries)):
            raise CheckpointError(
                f"{file.path} does not hold {some(absent)}, which {index.name} says are there. The files are not "
                "those of one save."
            )
        entries.update((tensor, entry) for tensor, entry in file.entries.items() if tensor in listed)
        surplus += [tensor for tensor in file.entries if tensor not in listed and tensor not in places]
    return Weights(tuple(files), entries, tuple(surplus))


def _locate(folder: Path, stem: str) -> Path:
    """The file to begin with: safetensors before torch's format."""
    found: list[Path] = []
    for safe in (True, False):
        layout = layout_of(stem, safe)
        both = [folder / name for name in (layout.whole, layout.index) if (folder / name).exists()]
        if len(both) == 2:
            raise CheckpointError(
                f"{folder} holds {layout.whole} and {layout.index}: two models, of which one is left over from an "
                "earlier save. Delete it, or give the path of the one that is meant."
            )
        found += both
    if len(found) > 1:
        get_logger(__name__).warning(
            f"{folder} holds {found[0].name} and {found[1].name}; {found[0].name} is read. Give the path of the other "
            "one if that is meant."
        )
    return found[0] if found else _other_index(folder, stem)


def _other_index(folder: Path, stem: str) -> Path:
    """The index of a model that was saved under another name, if there is just one."""
    others = sorted(folder.glob("*.index.json"))
    if len(others) == 1 and stem == "model":
        return others[0]
    seen = f"{len(others)} indexes ({some([path.name for path in others])})" if others else "no index"
    names = ", ".join(layout_of(stem, safe).whole for safe in (True, False))
    raise CheckpointError(f"{folder} holds no model: there is none of {names}, and {seen}.")
