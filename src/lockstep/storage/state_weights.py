"""The model files of a state in a folder into which ``save_model`` writes too.

Both have the same names, which other tools know. The state's files move into a folder of their own, and the manifest
says so; each step leaves the state loadable if it is the last one.
"""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path

from lockstep.errors import CheckpointError
from lockstep.storage import commit, manifest
from lockstep.storage.disk import Disk
from lockstep.storage.manifest import Manifest
from lockstep.storage.model_file_names import layouts_of

FOLDER = "lockstep_model"
"""Inside the state's folder."""


def locate(path: Path, found: Manifest, stem: str) -> Path:
    """The file of a state with which a model begins: one that the manifest lists, whatever else is in the folder."""
    for folder in (FOLDER + "/", ""):
        for layout in layouts_of(stem):
            for name in layout.entry_points:
                if folder + name in found.files:
                    return path / folder / name
    names = ", ".join(layout.whole for layout in layouts_of(stem))
    raise CheckpointError(f"{path} holds no model: its {manifest.NAME} lists none of {names}.")


def set_aside(folder: Path, disk: Disk, *, durable: bool, stem: str = "model") -> None:
    """Called by who has the right to write there. Move the state's files of a model out of the way, if it holds one."""
    try:
        found = manifest.read(folder)
    except CheckpointError:
        return  # nothing here that could be loaded as a state
    names = [name for name in found.files if any(layout.owns(name) for layout in layouts_of(stem))]
    if not names:
        return
    disk.make(folder / FOLDER, durable=durable)
    for name in names:
        disk.unlink(folder / FOLDER / name)  # of a save that was interrupted here
        disk.link_or_copy(folder / name, folder / FOLDER / name, durable=durable)
    if durable:
        disk.fsync_folder(folder / FOLDER)
        disk.fsync_folder(folder)
    files = {f"{FOLDER}/{name}" if name in names else name: entry for name, entry in found.files.items()}
    fresh = commit.partial_inside(folder, secrets.token_hex(8))
    disk.create(fresh, dataclasses.replace(found, files=files).dump(), durable=durable)
    disk.rename(fresh, folder / manifest.NAME)
    if durable:
        disk.fsync_folder(folder)
