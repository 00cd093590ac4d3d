"""What a test may not leave behind: threads, open descriptors, variables, a process group, files, another directory.

A `Snapshot` is taken before the test; `left_behind()` compares after it, says what is new, and puts back what can
be put back, so that one careless test does not fail the next one.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

# Long enough for a thread that has been told to stop to be seen stopping.
GRACE_SECONDS = 2.0

# Pools of ranks outlive a test on purpose: a fixture of wider scope owns them. The other names belong to libraries
# that keep one helper thread for the life of the process and offer no way to end it.
KEPT_THREADS = ("lockstep-pool", "InductorSubproc")
KEPT_THREAD_CLASSES = ("tqdm._monitor.TMonitor",)

# Opened once for the life of the process: by the interpreter, and by matplotlib, for its fonts.
KEPT_DESCRIPTORS = ("/dev/urandom",)
KEPT_FILE_TYPES = (".ttf",)

# Set by pytest for each phase, by scikit-learn and torch's compiler when first used.
KEPT_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_")

# Written into the working directory by the tools that run the tests.
KEPT_FILES = frozenset(
    {"__pycache__", ".coverage", ".hypothesis", ".import_linter_cache", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of this process at one moment, in the parts a test could leave changed."""

    threads: frozenset[threading.Thread]
    descriptors: dict[int, str]
    variables: dict[str, str]
    has_group: bool
    cwd: str
    files: dict[str, frozenset[str]]

    @classmethod
    def take(cls, *folders: Path) -> Snapshot:
        """Look at the process, its working directory, and the given folders (top level only)."""
        cwd = os.getcwd()
        return cls(
            threads=frozenset(threading.enumerate()),
            descriptors=descriptors(),
            variables=_variables(),
            has_group=_has_group(),
            cwd=cwd,
            files={folder: _listing(folder) for folder in {cwd, *map(str, folders)}},
        )

    def left_behind(self, grace: float = GRACE_SECONDS) -> list[str]:
        """Say what is there now that was not there then, one line each, and undo what can be undone."""
        # Descriptors last: what a thread holds goes with it.
        found = [*self._directory(), *self._variables(), *self._group(), *self._files()]
        return [*found, *_once_settled(self._new_threads, grace), *_once_settled(self._new_descriptors, grace)]

    def _directory(self) -> list[str]:
        try:
            now = os.getcwd()
        except FileNotFoundError:
            now = "a directory that is gone"
        if now == self.cwd:
            return []
        os.chdir(self.cwd)
        return [f"the working directory: now {now}"]

    def _variables(self) -> list[str]:
        now = _variables()
        lines = []
        for name in sorted(now.keys() | self.variables.keys()):
            before, after = self.variables.get(name), now.get(name)
            if before == after:
                continue
            verb = "added" if before is None else "removed" if after is None else "changed"
            lines.append(f"environment variable {name}: {verb}")
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
        return lines

    def _group(self) -> list[str]:
        if self.has_group or not _has_group():
            return []
        sys.modules["torch.distributed"].destroy_process_group()
        return ["the default process group: still initialised"]

    def _files(self) -> list[str]:
        return [
            f"file {os.path.join(folder, name)}"
            for folder, before in self.files.items()
            for name in sorted(_listing(folder) - before)
        ]

    def _new_threads(self) -> list[str]:
        new = [t for t in threading.enumerate() if t not in self.threads and not _is_kept(t)]
        return [f"thread {t.name!r}{' (daemon)' if t.daemon else ''}" for t in new]

    def _new_descriptors(self) -> list[str]:
        new = {fd: target for fd, target in descriptors().items() if self.descriptors.get(fd) != target}
        kept = _descriptors_of_pools() if new else set()
        return [f"descriptor {fd}: {target}" for fd, target in new.items() if fd not in kept]


def _once_settled(look: Callable[[], list[str]], grace: float) -> list[str]:
    """What is still seen after a while: something that ends by itself, or is collected, is not left behind."""
    deadline = time.monotonic() + grace
    collected = False
    while (found := look()) and time.monotonic() < deadline:
        if not collected:
            # An owner that sits in a reference cycle lets go when it is collected.
            gc.collect()
            collected = True
        time.sleep(0.02)
    return found


def _is_kept(thread: threading.Thread) -> bool:
    kind = type(thread)
    return (
        thread.name.startswith(KEPT_THREADS)
        or f"{kind.__module__}.{kind.__qualname__}" in KEPT_THREAD_CLASSES
        # A thread of native code that once called into Python: Python can neither see it end nor join it.
        or isinstance(thread, threading._DummyThread)
    )


def descriptors() -> dict[int, str]:
    """Number -> what it leads to, of those that are open. Pipes and sockets have a number in their names."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):  # the one that the list was read from
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith(KEPT_DESCRIPTORS) and not target.endswith(KEPT_FILE_TYPES):
                found[int(name)] = target
    return found


def _descriptors_of_pools() -> set[int]:
    """Those of ranks that other tests will use, and of the servers that Python forks them from."""
    servers = (forkserver._forkserver._forkserver_alive_fd, resource_tracker._resource_tracker._fd)
    found = {fd for fd in servers if fd is not None}
    ranks = sys.modules.get("lockstep.testing.ranks")
    for pool in ranks._POOLS.every if ranks is not None else ():
        for member in pool._members:
            found |= {member.pipe.fileno(), member._lifeline.fileno(), *member.process._popen.finalizer._args}
    return found


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(KEPT_VARIABLES)}


def _has_group() -> bool:
    # Looked up, not imported: a test that never touches torch does not pay for it.
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _listing(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder)) - KEPT_FILES
    except FileNotFoundError:
        return frozenset()
