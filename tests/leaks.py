"""What a test may not leave behind: threads, environment variables, a process group, files, another directory.

A `Snapshot` is taken before the test; `left_behind()` compares after it, says what is new, and puts back what can
be put back, so that one careless test does not fail the next one.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# Long enough for a thread that has been told to stop to be seen stopping.
GRACE_SECONDS = 2.0

# Pools of ranks outlive a test on purpose: a fixture of wider scope owns them. The other names belong to libraries
# that keep one helper thread for the life of the process and offer no way to end it.
KEPT_THREADS = ("lockstep-pool", "InductorSubproc")
KEPT_THREAD_CLASSES = ("tqdm._monitor.TMonitor",)

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
            variables=_variables(),
            has_group=_has_group(),
            cwd=cwd,
            files={folder: _listing(folder) for folder in {cwd, *map(str, folders)}},
        )

    def left_behind(self, grace: float = GRACE_SECONDS) -> list[str]:
        """Say what is there now that was not there then, one line each, and undo what can be undone."""
        return [*self._directory(), *self._variables(), *self._group(), *self._files(), *self._threads(grace)]

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

    def _threads(self, grace: float) -> list[str]:
        deadline = time.monotonic() + grace
        collected = False
        while new := self._new_threads():
            if time.monotonic() >= deadline:
                return [f"thread {t.name!r}{' (daemon)' if t.daemon else ''}" for t in new]
            if not collected:
                # An owner that sits in a reference cycle ends its threads when it is collected.
                gc.collect()
                collected = True
            time.sleep(0.02)
        return []

    def _new_threads(self) -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in self.threads and not _is_kept(t)]


def _is_kept(thread: threading.Thread) -> bool:
    kind = type(thread)
    return (
        thread.name.startswith(KEPT_THREADS)
        or f"{kind.__module__}.{kind.__qualname__}" in KEPT_THREAD_CLASSES
        # A thread of native code that once called into Python: Python can neither see it end nor join it.
        or isinstance(thread, threading._DummyThread)
    )


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
