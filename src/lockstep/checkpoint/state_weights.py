"""The model files of a state in a folder into which ``save_model`` writes too.

Both have the same names, which other tools know. The state's files move into a folder of their own, and the manifest
says so; each step leaves the state loadable if it is the last one.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from lockstep.checkpoint import manifest
from lockstep.checkpoint.disk import Disk
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.weights import Layout, layout_of
from lockstep.errors import CheckpointError

FOLDER = "lockstep_model"
"""Inside the state's folder."""


def locate(path: Path, found: Manifest, stem: str) -> Path:
    """The file of a state with which a model begins: one that the manifest lists, whatever else is in the folder."""
    for folder in (FOLDER + "/", ""):
        for layout in _layouts(stem):
            for name in (layout.index, layout.whole):
                if folder + name in found.files:
                    return path / folder / name
    names = ", ".join(layout.whole for layout in _layouts(stem))
    raise CheckpointError(f"{path} holds no model: its {manifest.NAME} lists none of {names}.")


def set_aside(folder: Path, stem: str = "model") -> None:
    """Move the state's files of a model out of the way, if the folder holds a state."""
    try:
        found = manifest.read(folder)
    except CheckpointError:
        return  # nothing here that could be loaded as a state
    names = [name for name in found.files if any(layout.owns(name) for layout in _layouts(stem))]
    if not names:
        return
    (folder / FOLDER).mkdir(exist_ok=True)
    for name in names:
        _copy(folder / name, folder / FOLDER / name)
    Disk().fsync_folder(folder / FOLDER)
    files = {f"{FOLDER}/{name}" if name in names else name: entry for name, entry in found.files.items()}
    _replace(folder / manifest.NAME, dataclasses.replace(found, files=files).dump())
    Disk().fsync_folder(folder)


def _layouts(stem: str) -> list[Layout]:
    return [layout_of(stem, safe) for safe in (True, False)]


def _copy(source: Path, target: Path) -> None:
    """Give the file a second name, where the file system can, or else its content a second file."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    beside.unlink(missing_ok=True)
    try:
        os.link(source, beside)
    except OSError:
        shutil.copyfile(source, beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
    beside.replace(target)


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
