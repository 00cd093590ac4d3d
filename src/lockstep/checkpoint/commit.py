"""A checkpoint appears as a whole or not at all.

It is written into a folder beside its place, whose name begins with a dot. When all files and the manifest are on the
medium the folder gets its name, by one rename; an older checkpoint of that name is swapped with it at the same
instant, and only then deleted. So whenever the process or the machine stops, what is found under the name is the old
one or the new one, complete.

Who writes holds a *claim*, a small file beside the place that says which process it is. A second writer is refused; a
claim whose process is gone is taken over, and what that process left behind is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.blackbox import processes
from lockstep.checkpoint import manifest
from lockstep.checkpoint.disk import Disk
from lockstep.errors import CheckpointError

HEARTBEAT = 5.0
"""Seconds after which a writer touches its claim again."""
PATIENCE = 20.0
"""Seconds without a sign of life after which a writer on another machine counts as gone."""
PREFIX = "checkpoint_"
"""Of the folders that are numbered by us."""
MARK = ".unfinished"
"""A file in a folder that was never complete."""
_NUMBERED = re.compile(PREFIX + r"(\d+)")


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """The numbered checkpoints in a folder, the newest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    found = [(int(match[1]), folder / name) for name in names if (match := _NUMBERED.fullmatch(name))]
    return sorted(found, reverse=True)


def beside(place: Path, token: str) -> Path:
    """Where a checkpoint is while it is written, or on its way out."""
    return place.with_name(f".{place.name}.{token}.partial")


def left_beside(place: Path) -> list[Path]:
    """Such folders that are there, of whichever writer."""
    pattern = re.compile(re.escape(f".{place.name}.") + r"[0-9a-f]{16}\.partial")
    with contextlib.suppress(OSError):
        return [place.with_name(name) for name in os.listdir(place.parent) if pattern.fullmatch(name)]
    return []


class Claim:
    """The right to write to one place, held by one process of one job at a time."""

    def __init__(self, path: Path, token: str, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self.token = token
        """Tells this writer's folder from those of others."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self) -> None:
        """Show from now on that the writer lives, for those on other machines who cannot see its process."""
        self._thread = threading.Thread(target=self._beat, name="lockstep-claim", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def release(self) -> None:
        """Give up the right."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            if _owner(self.path).get("token") == self.token:
                self._disk.unlink(self.path)


def claim(place: Path, disk: Disk, *, numbered_in: Path | None = None) -> Claim:
    """The right to write to a place; CheckpointError when another process has it.

    With ``numbered_in`` it is the right to all numbered checkpoints of that folder, since writing one deletes others.
    """
    path = _claim_path(place, numbered_in)
    token = secrets.token_hex(8)
    text = json.dumps(
        {
            "token": token,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "started": (began := processes.started(os.getpid())),
            "folder": str(place),
        }
    )
    for _ in range(10):
        # Linked into place, so that whoever finds it can read it: a file made first and filled after is empty at times.
        fresh = path.with_name(f"{path.name}.{os.getpid()}.{began}.{token}")
        disk.create(fresh, text)
        try:
            _link(fresh, path, disk)
            return Claim(path, token, disk)
        except FileExistsError:
            _remove_if_dead(path, place)
        except FileNotFoundError:
            pass  # swept away by somebody on another machine, who cannot see that we live
        finally:
            disk.unlink(fresh)
    raise CheckpointError(
        f"{path} keeps coming back: several processes want to write to {place}. Let one of them do it."
    )


def _claim_path(place: Path, numbered_in: Path | None) -> Path:
    return numbered_in / ".writing" if numbered_in is not None else place.with_name(f".{place.name}.writing")


def _link(fresh: Path, path: Path, disk: Disk) -> None:
    try:
        disk.link(fresh, path)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:  # a file system without links
        with path.open("x") as file:
            file.write(fresh.read_text())


def _owner(path: Path) -> dict[str, Any]:
    try:
        owner = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _remove_if_dead(path: Path, place: Path) -> None:
    """Remove a claim whose process is gone; CheckpointError while it lives."""
    owner = _owner(path)
    if not owner:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime < PATIENCE:
                return  # gone in between, or not ours and fresh: look again
            path.unlink()
        return
    if not _lives(path, owner):
        # Under a name of its own first: of two that find it dead, one would else remove the other's new claim.
        aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, aside)
            if _owner(aside).get("token") != owner.get("token"):
                with contextlib.suppress(FileExistsError):
                    os.link(aside, path)  # somebody was faster: it is theirs
            aside.unlink()
        return
    what = owner.get("folder") or place
    raise CheckpointError(
        f"{place} cannot be written: process {owner.get('pid')} on {owner.get('host')} is writing {what}. Two writers "
        "would delete each other's files: let each job save to a folder of its own, or wait for the other one to end."
    )


def _lives(path: Path, owner: dict[str, Any]) -> bool:
    pid, began = owner.get("pid"), owner.get("started")
    if owner.get("host") == os.uname().nodename and isinstance(pid, int) and isinstance(began, int):
        return processes.look(pid, began).alive
    # On another machine: it touches the file as long as it lives. No clocks are compared, they may differ.
    with contextlib.suppress(FileNotFoundError):
        before = path.stat().st_mtime_ns
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            time.sleep(0.2)
            if path.stat().st_mtime_ns != before:
                return True
    return False


def begin(folder: Path, disk: Disk) -> None:
    """Make the folder to write into. A mark in it says that it was never more than that."""
    disk.make(folder)
    disk.create(folder / MARK)


def complete(folder: Path, disk: Disk) -> None:
    """Take the mark away: all files are there, and the manifest with them."""
    disk.unlink(folder / MARK)


def sweep(place: Path, disk: Disk, *, all_numbered: bool = False) -> None:
    """Called by who holds the claim. Remove what writers that are gone have left."""
    places = {place, *_left_numbers(place.parent)} if all_numbered else {place}
    for named in places:
        for folder in left_beside(named):
            retire(folder, named, disk)
    claims = _claim_path(place, place.parent if all_numbered else None)
    pattern = re.compile(re.escape(claims.name) + r"\.(\d+)\.(\d+)\.[0-9a-f]{16}")
    for name in os.listdir(claims.parent):
        match = pattern.fullmatch(name)
        if match and not processes.look(int(match[1]), int(match[2])).alive:
            disk.unlink(claims.with_name(name))


def _left_numbers(folder: Path) -> set[Path]:
    pattern = re.compile(r"\.(" + PREFIX + r"\d+)\.[0-9a-f]{16}\.partial")
    with contextlib.suppress(OSError):
        return {folder / match[1] for name in os.listdir(folder) if (match := pattern.fullmatch(name))}
    return set()


def publish(folder: Path, place: Path, disk: Disk, *, durable: bool) -> None:
    """Give a complete folder its name. An older checkpoint of that name is gone when this returns."""
    if durable:
        for inner in _folders(folder):
            disk.fsync_folder(inner)
    swapped = False
    if place.exists():
        swapped = disk.exchange(folder, place)
        if not swapped:
            # Two renames: between them there is nothing under the name. Who looks for it then looks beside it.
            aside = beside(place, secrets.token_hex(8))
            disk.rename(place, aside)
            disk.rename(folder, place)
            folder, swapped = aside, True
    else:
        disk.rename(folder, place)
    if durable:
        disk.fsync_folder(place.parent)
    if swapped:
        retire(folder, place, disk)


def _folders(folder: Path) -> Iterator[Path]:
    """The folder and those in it, the innermost first."""
    for path, _, _ in os.walk(folder, topdown=False):
        yield Path(path)


def retire(folder: Path, place: Path, disk: Disk) -> None:
    """Delete a folder that is no checkpoint any more. What was in it besides the checkpoint moves to its successor."""
    if not (folder / MARK).exists() and place.is_dir():
        with contextlib.suppress(OSError):
            own = _names_of(folder)
            for name in os.listdir(folder):
                if name not in own and not (place / name).exists():
                    disk.rename(folder / name, place / name)
    disk.remove(folder)


def _names_of(folder: Path) -> set[str]:
    """What is a checkpoint's own in a folder; nothing when we cannot tell."""
    try:
        return {name.split("/")[0] for name in manifest.read(folder).files} | {manifest.NAME}
    except CheckpointError:
        return set()


def discard(path: Path, disk: Disk) -> None:
    """Delete a checkpoint: first its name, then its files, so that nobody ever finds half of it."""
    aside = beside(path, secrets.token_hex(8))
    disk.rename(path, aside)
    disk.remove(aside)


def prune(folder: Path, keep: int, disk: Disk) -> list[Path]:
    """Delete the oldest numbered checkpoints of a folder; those that were."""
    gone = []
    for path in surplus(folder, keep):
        with contextlib.suppress(OSError):
            discard(path, disk)
            gone.append(path)
    return gone


def surplus(folder: Path, keep: int) -> list[Path]:
    """What goes when so many are kept. Only complete ones count; what is older than the last of them goes."""
    from lockstep.checkpoint.find import look  # which looks here for the numbered ones

    kept, found = 0, []
    for _, path in numbered(folder):
        if kept >= keep:
            found.append(path)
        elif look(path).problem is None:
            kept += 1
    return found
