"""What processes of a job leave when they are killed: others that they have started, sockets, shared memory.

Only what is surely the job's own is ended or removed. Processes are found by their process group, or by the mark in
their environment. Python's multiprocessing keeps its sockets in a folder that the launcher has made for the job, and a
file of torch's in shared memory carries the number of the process that made it; each process that a rank forks notes
its own in that folder. Named semaphores and the files of torch's strategy "file_system" are removed by two helpers, who
see when their processes have gone: they are given the time for it.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

VARIABLE = "LOCKSTEP_JOB"
"""The variable that marks the job's processes: the path of their folder, even where that could not be made."""
LAUNCHER = "LOCKSTEP_LAUNCHER"
"""The variable that holds the launcher's process number, for ranks that it starts itself and that end with it."""
_SHARED_MEMORY = Path("/dev/shm")
_LONGEST = 89
"""Bytes of the folder's path: that of a socket in it may have 107, and 18 are for its name."""
_BEGAN = "began"
"""A file in it, as old as the job."""
_HELPERS = (b"torch_shm_manager", b"multiprocessing.resource_tracker")
_PATIENCE = 4.0
"""Seconds that the helpers get when everybody else has gone: torch's waits for two, whether somebody comes back."""


# --- processes -----------------------------------------------------------------------------------------------------


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal a rank and what it has started, without the helpers that clean up after them."""
    helpers = [pid for pid in _members([group]) if _is_helper(pid)]
    with suppress(ProcessLookupError, PermissionError):
        if not helpers:
            os.killpg(group, number)
    if helpers:
        _send([pid for pid in _members([group]) if pid not in helpers], number)


def end_groups(groups: Iterable[int]) -> None:
    """Kill what is left in these process groups."""
    groups = list(groups)
    if not os.path.isdir("/proc/self"):
        for group in groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
    elif groups:
        _end(lambda: _members(groups))


def end_marked(mark: str, group: int | None = None) -> None:
    """Kill what carries the mark, in this process group if one is given; never this process."""
    _end(lambda: [pid for pid in _marked(mark) if group is None or _group(pid) == group])


def _end(find: Callable[[], list[int]]) -> None:
    until = time.monotonic() + _PATIENCE
    while found := find():
        others = [pid for pid in found if not _is_helper(pid)]
        late = time.monotonic() - until
        _send(found if late > 0 else others, signal.SIGKILL)
        if late > _PATIENCE:
            return  # what cannot be killed waits for a disk, or is another user's
        time.sleep(0.02)  # what is killed may have been starting another


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _members(groups: Iterable[int]) -> list[int]:
    """Processes of these groups that have not ended."""
    wanted = set(groups)
    return [pid for pid in _processes() if _group(pid) in wanted]


def _marked(mark: str) -> list[int]:
    text = f"{VARIABLE}={mark}\0".encode()
    found = []
    for pid in _processes():
        with suppress(OSError):
            if pid != os.getpid() and text in Path("/proc", str(pid), "environ").read_bytes():
                found.append(pid)
    return found


def _processes() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def _group(pid: int) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
        # The second field is the program's name in parentheses and may hold anything; no later one has parentheses.
        state, _, group, *_ = stat.rpartition(")")[2].split()
        return None if state in ("Z", "X", "x") else int(group)
    return None


def _is_helper(pid: int) -> bool:
    with suppress(OSError):
        command = Path("/proc", str(pid), "cmdline").read_bytes()
        return any(name in command for name in _HELPERS)
    return False


# --- files ---------------------------------------------------------------------------------------------------------


def make_folder() -> str:
    """The mark of a new job: the path of a folder for its processes, or of one that could not be made."""
    import tempfile

    try:
        folder = tempfile.mkdtemp(prefix="lockstep-")
    except OSError:  # no room, or no such place: then it is a mark only
        return f"/lockstep-{os.urandom(12).hex()}"
    if len(os.fsencode(folder)) > _LONGEST:
        os.rmdir(folder)
    else:
        with suppress(OSError):
            Path(folder, _BEGAN).touch()
    return folder


def use_folder(folder: str) -> None:
    """Called on: each rank. Have multiprocessing use the job's folder, here and in what is forked from here."""
    from multiprocessing import process

    if not os.path.isdir(folder):
        return
    # What multiprocessing.util.get_temp_dir looks at first. Without it each process makes one, "pymp-…", and only a
    # process that ends by itself removes it.
    process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    _note(folder)
    os.register_at_fork(after_in_child=lambda: _note(folder))


def _note(folder: str) -> None:
    with suppress(OSError):
        os.close(os.open(f"{folder}/{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def remove_files(mark: str) -> None:
    """Remove what the job's processes have left, once all of them have ended; nothing while one lives."""
    folder = Path(mark)
    if not folder.is_dir():
        return
    until = time.monotonic() + _PATIENCE
    while alive := _marked(mark):
        # In this order: one that has ended since is no helper, but no reason to leave anything either.
        if time.monotonic() > until or any(not _is_helper(pid) and _group(pid) is not None for pid in alive):
            return
        time.sleep(0.05)
    with suppress(OSError):
        began = (folder / _BEGAN).lstat().st_mtime
        dead = {int(name) for name in os.listdir(folder) if name.isdecimal()}.difference(_processes())
        for path in _SHARED_MEMORY.glob("torch_*_*"):
            number = path.name.split("_")[1]
            about = path.lstat()
            if number.isdecimal() and int(number) in dead and about.st_uid == os.geteuid() and about.st_mtime >= began:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)
