"""The tracker that needs nothing installed: a file with one JSON record in each line.

A record is appended by one write to the file's end, under a lock: processes that share the file do not mix their lines,
and a process that is killed leaves whole lines. Only a power loss or a full disk can cut the last line short. Then it
is taken back, by whoever opens the file next or by the write that failed: what follows starts on a line of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.tracking.built_in import BuiltInTracker
from lockstep.tracking.failures import guarded
from lockstep.tracking.general import on_main_process
from lockstep.tracking.values import plain, scalars

FILE = "metrics.jsonl"
"""The name of the file, in the folder of the project's name."""
_BLOCK = 1 << 16


class JsonlTracker(BuiltInTracker):
    """Appends records to ``logging_dir/run_name/metrics.jsonl``.

    With ``durable=True`` each record is on the disk before ``log`` returns, which takes milliseconds; without, a power
    loss may cost the last seconds.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], *, durable: bool = False) -> None:
        super().__init__()
        if not isinstance(durable, bool):
            raise ConfigError(f"init_kwargs['jsonl']: durable={durable!r} must be True or False.")
        self.run_name = run_name
        self.path = Path(logging_dir) / run_name / FILE
        self._durable = durable

    @on_main_process
    def start(self) -> None:
        """Open the file; one that is there already is continued."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._run = JsonLines(self.path, durable=self._durable)
        self._run.append({"kind": "start", "project": self.run_name})

    @guarded
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """A record of the settings; what JSON does not know becomes its text."""
        self.tracker.append({"kind": "config", "values": plain(values)})

    @guarded
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """A record of values; further keyword arguments become fields of it."""
        self.tracker.append({"kind": "log", "step": plain(step), "values": plain(scalars(values)), **plain(kwargs)})

    @guarded
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """A record of a table: column names and rows, or a dataframe."""
        if dataframe is not None:
            columns, data = list(dataframe.columns), dataframe.to_numpy().tolist()
        if data is None:
            raise TypeError("log_table() takes data= or dataframe=, and got neither")
        table = {"name": table_name, "columns": plain(columns), "rows": plain(data)}
        self.tracker.append({"kind": "table", "step": plain(step), **table})

    def _end(self, run: Any) -> None:
        run.close()


class JsonLines:
    """A file that is open for appending."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        self._path, self._durable = path, durable
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with self._locked():
            self._cut_back()

    def append(self, record: dict[str, Any]) -> None:
        """Add one record, with the time."""
        line = _encode({"time": time.time(), **record})
        with self._locked():
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._file, line[written:])
            except OSError:
                self._cut_back()
                raise
        if self._durable:
            os.fsync(self._file)

    def close(self) -> None:
        """Wait until all is on the disk, and close."""
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """A region that one process is in at a time, where the file system has locks."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _cut_back(self) -> None:
        """Take back a last line that has no end."""
        size = end = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - _BLOCK)
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file, end)


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a file, also while it is being written: a last line that has no end yet is left out."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def _encode(record: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(record, allow_nan=False, ensure_ascii=False)
    except ValueError:
        text = json.dumps(_spelled(record), allow_nan=False, ensure_ascii=False)
    return text.encode(errors="backslashreplace") + b"\n"


def _spelled(value: Any) -> Any:
    """NaN and infinities as texts, which ``float`` reads: JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, list) else value
