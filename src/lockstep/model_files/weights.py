"""Model files: the weights of one model in a folder, under the names that other tools know (``layout``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.config.sizes import shard_size
from lockstep.errors import CheckpointError
from lockstep.logging import get_logger
from lockstep.model_files import safetensors_file, shards, torch_file
from lockstep.model_files.safetensors_file import SafeFile
from lockstep.model_files.shared_tensors import tied_names
from lockstep.model_files.state_loader import Assignment, NameDifferences, load_into
from lockstep.model_files.tensor_entry import read_all, some
from lockstep.model_files.torch_file import TorchFile
from lockstep.model_files.writer import PLAIN, Sink
from lockstep.storage import commit
from lockstep.storage.model_file_names import Layout, layout_of, layouts_of
from lockstep.storage.open_files import Opener, open_regular

__all__ = ["NameDifferences", "Weights", "load_into", "load_weights", "open_weights", "read_weights", "write_weights"]


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
    """
    largest = shard_size(max_shard_size)
    refuse_meta(state_dict)
    layout = layout_of(stem, safe)
    if safe:
        surplus = {name for names in tied_names(state_dict) for name in names[1:]}
        state_dict = {name: value for name, value in state_dict.items() if name not in surplus}
    plan = shards.plan(state_dict, largest, layout.stem, layout.suffix, together=not safe)
    write = safetensors_file.write if safe else torch_file.write
    for file, names in plan.files.items():
        write({name: state_dict[name] for name in names}, folder / file, sink)
    if not plan.sharded:
        return list(plan.files)
    with sink.open(folder / layout.index) as opened:
        opened.write(plan.index())
    return [*plan.files, layout.index]


def refuse_meta(state_dict: Mapping[str, Any]) -> None:
    """Raise when there are tensors without values."""
    lazy = [name for name, value in state_dict.items() if is_lazy(value)]
    if lazy:
        raise CheckpointError(
            f"{len(lazy)} of {len(state_dict)} tensors have no shape yet: their lazy modules have not been called "
            f"({some(lazy)}). Call the model once, then save it."
        )
    empty = [name for name, value in state_dict.items() if isinstance(value, Tensor) and value.device.type == "meta"]
    if empty:
        raise CheckpointError(
            f"{len(empty)} of {len(state_dict)} tensors have no values: they are on the meta device ({some(empty)}). "
            "Parts that were offloaded or never loaded cannot be saved; load the whole model first."
        )


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Weights:
    """Opened model files, of which the headers have been checked."""

    files: tuple[SafeFile | TorchFile, ...]
    entries: dict[str, Any]
    surplus: tuple[str, ...] = ()
    """Names that a file holds and the index does not know."""

    def close(self) -> None:
        """Let go of the files."""
        for file in self.files:
            file.close()


@contextmanager
def open_weights(
    path: Path, stem: str = "model", opener: Opener = open_regular, *, hashed: bool = False
) -> Iterator[Weights]:
    """A model's files, for as long as the region lasts: a file, an index, or the folder that they are in."""
    found = _locate(path, stem) if path.is_dir() else commit.pending_file(path)
    if found.parent not in (path, path.parent):
        get_logger(__name__).warning(commit.reads_pending(found.parent.parent))
    files: list[SafeFile | TorchFile] = []
    try:
        if found.suffix == ".json":
            yield _open_shards(found, files, opener, hashed)
        else:
            files.append(_open(found, opener, hashed))
            yield Weights(tuple(files), dict(files[0].entries))
    finally:
        for file in files:
            file.close()


def read_weights(folder: Path, stem: str = "model") -> dict[str, Any]:
    """The state dict in a folder's model files, mapped into memory: changes of it do not reach the files."""
    with open_weights(folder, stem) as weights:
        return read_all(weights.entries)


def load_weights(model: nn.Module, folder: Path, stem: str = "model", strict: bool = True) -> NameDifferences:
    """Load a folder's model files into a model: twice as fast as ``read_weights`` and ``load_into``, in less memory.

    Whoever has several models to load makes the ``Assignment`` of each first, and runs them when all fit.
    """
    with open_weights(folder, stem) as weights:
        assignment = Assignment(model, weights.entries, strict, str(folder), surplus=weights.surplus)
        assignment.run()
        return assignment.loaded


def _open(path: Path, opener: Opener, hashed: bool) -> SafeFile | TorchFile:
    return SafeFile(path, opener) if path.suffix == ".safetensors" else TorchFile(path, opener, hashed=hashed)


def _open_shards(index: Path, files: list[SafeFile | TorchFile], opener: Opener, hashed: bool) -> Weights:
    places = shards.read_index(index, opener)
    entries: dict[str, Any] = {}
    surplus: list[str] = []
    for name in sorted(set(places.values())):
        if not (index.parent / name).exists():
            raise CheckpointError(f"{index.parent / name} is missing; {index.name} names it.")
        files.append(file := _open(index.parent / name, opener, hashed))
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
    committed = commit.pending(folder)
    for layout in layouts_of(stem):
        both = _entry_points(committed, layout) or _entry_points(folder, layout)
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


def _entry_points(folder: Path | None, layout: Layout) -> list[Path]:
    if folder is None:
        return []
    return [folder / name for name in (layout.whole, layout.index) if (folder / name).exists()]


def _other_index(folder: Path, stem: str) -> Path:
    """The index of a model that was saved under another name, if there is just one."""
    others = sorted(folder.glob("*.index.json"))
    if len(others) == 1 and stem == "model":
        return others[0]
    seen = f"{len(others)} indexes ({some([path.name for path in others])})" if others else "no index"
    names = ", ".join(layout.whole for layout in layouts_of(stem))
    raise CheckpointError(f"{folder} holds no model: there is none of {names}, and {seen}.")
