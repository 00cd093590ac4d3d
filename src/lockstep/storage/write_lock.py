"""The right to write to a folder: a small file in it, or beside it, that says which process is writing.

A second writer is refused. A lock whose process has died is taken over, and what that process left is removed. Whether
it has died is looked up where this process can see it: on the same boot of the same machine, in the same pid namespace,
of the same user. Everywhere else (another node, another container) its sign of life decides: a writer touches the file
every few seconds. The age of that sign is taken from the file system's own clock; nodes may disagree about time.

A process that was paused for long may find its lock taken over when it continues. So it reads the lock again before
each step that others would see, and stops when it is not its own any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import threading
import time
from pathlib import Path
from typing import Any

from lockstep.blackbox import processes
from lockstep.errors import CheckpointError
from lockstep.storage.disk import Disk

HEARTBEAT = 5.0
"""Seconds after which a writer touches its lock again."""
PATIENCE = 20.0
"""Seconds without a sign of life after which a writer that cannot be seen counts as gone."""
_POLL = 0.2
_LARGEST = 1 << 16


class WriteLock:
    """The right to write to one folder, held by one process of one job at a time."""

    def __init__(self, path: Path, token: str, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        self.token = token
        """Tells this writer's files from those of others."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lockstep-write-lock", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            with contextlib.suppress(OSError, CheckpointError):
                if _read(self.path).get("token") == self.token:  # a successor's is not ours to keep alive
                    os.utime(self.path)

    def check(self) -> None:
        """CheckpointError when another process has taken over."""
        owner = _read(self.path)
        if owner.get("token") != self.token:
            who = f"{_name(owner)} has taken over" if owner else "the file was removed"
            raise CheckpointError(
                f"This process has lost the right to write that {self.path} gives: {who}. A writer that shows no sign "
                f"of life for {PATIENCE:.0f} s, because it was paused or its file system did not answer, counts as "
                "gone. Let only one job save to a folder."
            )

    def release(self) -> None:
        """Give up the right."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError, CheckpointError):
            if _read(self.path).get("token") == self.token:
                self._disk.unlink(self.path)


def acquire(path: Path, place: Path, disk: Disk, *, wait: float = 0.0) -> WriteLock:
    """The right to write to a place; CheckpointError when another process has it, and keeps it for ``wait`` seconds."""
    token = secrets.token_hex(8)
    mine = _this_process()
    text = json.dumps({"token": token, "host": os.uname().nodename, **mine, "folder": str(place)})
    deadline = time.monotonic() + wait
    fresh = path.with_name(f"{path.name}.{_spell(mine)}.{token}")
    for _ in range(10):
        # Linked into place, so that whoever finds it can read it: a file made first and filled after is empty at times.
        try:
            disk.create(fresh, text.encode())
            if _link(fresh, path, token, disk):
                return WriteLock(path, token, disk)
            while not _remove_if_dead(path, fresh):
                if time.monotonic() >= deadline:
                    raise _held(path, place)
                time.sleep(_POLL)
        except FileNotFoundError:
            pass  # swept away by somebody who cannot see that this process lives
        finally:
            disk.unlink(fresh)
    raise CheckpointError(
        f"{path} keeps coming back: several processes want to write to {place}. Let one of them do it."
    )


def refuse_if_held(path: Path, place: Path) -> None:
    """CheckpointError while another process has this right; the file of one that has died is removed."""
    if not _remove_if_dead(path, None):
        raise _held(path, place)


def sweep(path: Path, disk: Disk) -> None:
    """Called by who holds the lock. Remove what processes have left that died while they asked for it."""
    pattern = re.compile(re.escape(path.name) + r"\.(?:(\w*-\w*)-(\d+)-(\d+)\.)?[0-9a-f]{16}")
    mine = _this_process()
    for name in os.listdir(path.parent):
        if match := pattern.fullmatch(name):
            left = path.with_name(name)
            visible = match[1] is not None and match[1] == _spell(mine).rsplit("-", 2)[0]
            if (visible and not processes.find_process(int(match[2]), int(match[3])).alive) or _age(
                left, path
            ) > PATIENCE:
                disk.unlink(left)


def _link(fresh: Path, path: Path, token: str, disk: Disk) -> bool:
    try:
        disk.link(fresh, path)
    except FileExistsError:
        # On a network file system the answer may have been lost, and the call made twice.
        return _read(path).get("token") == token
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        try:
            disk.create(path, fresh.read_bytes())
        except FileExistsError:
            return False
    return True


def _read(path: Path) -> dict[str, Any]:
    """What a lock says of its writer; empty when there is none, or none yet.

    Opened, not looked at: on a network file system that is what asks the server.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. It says who is writing there: delete it if nobody is."
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise CheckpointError(f"{path} is not a plain file, so nobody can tell who is writing there. Delete it.")
        data = os.read(file, _LARGEST)
    finally:
        os.close(file)
    try:
        owner = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _remove_if_dead(path: Path, probe: Path | None) -> bool:
    """Remove a lock whose process is gone; False while it lives, True when it makes sense to try again."""
    owner = _read(path)
    if not os.path.lexists(path):
        return True
    if not _dead_for_sure(owner) and (_is_visible(owner) or _shows_life(path, probe)):
        return False
    # Under a name of its own first: of two that find it dead, one would else remove the other's new lock.
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if _read(aside).get("token") != owner.get("token"):
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)  # somebody was faster: it is theirs
        aside.unlink()
    return True


def _this_process() -> dict[str, Any]:
    """What tells this process from any other one, on whichever node, in whichever container."""
    boot = namespace = None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    started = processes.started(os.getpid())
    return {"boot": boot, "namespace": namespace, "pid": os.getpid(), "started": started, "user": os.getuid()}


def _spell(process: dict[str, Any]) -> str:
    """The same for a file's name: who dies before its file has content leaves that."""
    return f"{(process['boot'] or '')[:8]}-{process['namespace'] or ''}-{process['pid']}-{process['started']}"


def _is_visible(owner: dict[str, Any]) -> bool:
    """Whether this process would see the writer if it lived."""
    mine = _this_process()
    same = all(mine[key] is not None and owner.get(key) == mine[key] for key in ("boot", "namespace"))
    # Processes of other users are hidden on many clusters.
    same = same and mine["user"] in (0, owner.get("user"))
    return same and all(isinstance(owner.get(key), int) and owner[key] > 0 for key in ("pid", "started"))


def _dead_for_sure(owner: dict[str, Any]) -> bool:
    return _is_visible(owner) and not processes.find_process(owner["pid"], owner["started"]).alive


def _shows_life(path: Path, probe: Path | None) -> bool:
    """Watch a lock: whether its writer touches it. It is not judged by one look, however old its last sign is."""
    began, first = time.monotonic(), _touched(path)
    while first is not None:
        time.sleep(min(_POLL, HEARTBEAT))
        now = _touched(path)
        if now is None:
            return False
        if now != first:
            return True
        watched = time.monotonic() - began
        if watched > PATIENCE or (watched > 1.5 * HEARTBEAT and _age(path, probe) > PATIENCE):
            return False
    return False


def _touched(path: Path) -> int | None:
    """When a file was last changed; None when it is gone."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.fstat(file).st_mtime_ns
    finally:
        os.close(file)


def _age(path: Path, probe: Path | None) -> float:
    """Seconds since a file was changed, by the clock of its file system: that of a file of ours, touched now."""
    if probe is None:
        return 0.0
    with contextlib.suppress(OSError):
        os.utime(probe)
        return (os.stat(probe).st_mtime_ns - os.stat(path).st_mtime_ns) / 1e9
    return 0.0


def _name(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')}"


def _held(path: Path, place: Path) -> CheckpointError:
    owner = _read(path)
    return CheckpointError(
        f"{place} cannot be written: {_name(owner)} is writing {owner.get('folder') or place}. Two writers "
        "would delete each other's files: let each job save to a folder of its own, or wait for the other one to end."
    )
