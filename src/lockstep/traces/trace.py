"""Writing traces: the frames of one rank, a line of JSON each, in a file that survives the process.

A trace is a folder with a file per rank, ``rank_0.jsonl`` and so on. The first line says what it is, the last one that
it is whole; a trace without that last line was cut by the end of its process. `lockstep.traces.read_trace` reads it.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.traces.frames import Frame, Stat

VERSION = 1
MARK = "lockstep_trace"
"""The first key of the first line."""
_BUFFER_BYTES = 1 << 20
_BUFFER_SECONDS = 1.0


def open_trace(
    path: str | os.PathLike[str],
    *,
    rank: int,
    every: int = 1,
    batches: Collection[int] | None = None,
    world_size: int | None = None,
    format: str = "jsonl",
) -> TraceWriter:
    """Begin the trace of one rank in the folder ``path``.

    Kept are the frames of ``batches``, or of every ``every``-th batch from batch 0. An older trace of this rank in the
    folder is moved aside, not overwritten: after a restart it is the one that shows why.
    """
    if every < 1:
        raise ConfigError(f"open_trace: every={every} must be 1 or more.")
    if format == "parquet":
        from lockstep.traces import parquet

        parquet.require()
    elif format != "jsonl":
        raise ConfigError(f"open_trace: format={format!r} is unknown. Allowed: jsonl, parquet.")
    header = {
        MARK: VERSION,
        "rank": rank,
        "world_size": world_size,
        "every": every,
        "batches": None if batches is None else sorted(batches),
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "time": time.time(),
    }
    file = Path(path) / f"rank_{rank}.jsonl"
    try:
        os.makedirs(path, exist_ok=True)
        for old in (file, file.with_suffix(".parquet")):
            _move_aside(old)
        return TraceWriter(file, header, to_parquet=format == "parquet")
    except OSError as error:
        raise ConfigError(
            f"The trace of rank {rank} cannot be written to {os.path.abspath(path)}: {error.strerror or error}. "
            "Name a folder that can be."
        ) from None


def _move_aside(file: Path) -> None:
    if file.exists():
        number = 1
        while (aside := file.with_name(f"earlier_{number}_{file.name}")).exists():
            number += 1
        file.rename(aside)


class TraceWriter:
    """The trace of one rank while it is written. Any thread may add: backward hooks run on threads of their own."""

    def __init__(self, file: Path, header: dict[str, Any], *, to_parquet: bool) -> None:
        self.file = file
        """The file that is written; with Parquet, until ``close`` makes that of it."""
        self._every = header["every"]
        self._batches = None if header["batches"] is None else frozenset(header["batches"])
        self._to_parquet = to_parquet
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._lines = [encode_header(header)]
        self._size = 0
        self._frames = 0
        self._last_batch = -1
        self._flushed = time.monotonic()
        self._out = open(file, "xb")  # noqa: SIM115
        self._open = True
        self.flush()
        atexit.register(self.close)

    def wants(self, batch: int) -> bool:
        """Whether frames of this batch are kept; ask before computing them."""
        if not self._open:
            return False
        return batch % self._every == 0 if self._batches is None else batch in self._batches

    def add(self, frame: Frame) -> None:
        """Take one frame; those of batches that were not asked for are dropped."""
        # A forked process has a copy of the buffer, and must not write it a second time.
        if not self.wants(frame.batch) or os.getpid() != self._owner:
            return
        line = encode(frame)
        with self._lock:
            self._lines.append(line)
            self._frames += 1
            self._size += len(line)
            new_batch = frame.batch != self._last_batch
            self._last_batch = frame.batch
            waited = time.monotonic() - self._flushed
            if self._size >= _BUFFER_BYTES or waited >= _BUFFER_SECONDS * (1 if new_batch else 5):
                self._write()

    def flush(self) -> None:
        """Hand what was taken to the system: it then survives this process."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write the rest and the line that says that nothing is missing. Closing twice is fine."""
        with self._lock:
            if not self._open or os.getpid() != self._owner:
                return
            self._lines.append(encode_end(self._frames))
            self._write()
            whole = self._open
            self._open = False
            with suppress(OSError):
                self._out.close()
        atexit.unregister(self.close)
        if self._to_parquet and whole:
            self._convert()

    def _write(self) -> None:
        if not self._open or not self._lines or os.getpid() != self._owner:
            return
        data = b"".join(self._lines)
        self._lines, self._size, self._flushed = [], 0, time.monotonic()
        try:
            self._out.write(data)
            self._out.flush()
        except OSError as error:
            # The run is worth more than its trace.
            self._open = False
            with suppress(OSError):
                self._out.close()
            warnings.warn(
                f"The trace {self.file} ends here: {error.strerror or error}. The run goes on without it.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _convert(self) -> None:
        from lockstep.traces import parquet

        try:
            parquet.convert(self.file)
        except Exception as error:  # the trace is whole, only its form is not the one asked for
            warnings.warn(
                f"The trace {self.file} stays as it is, Parquet cannot be made of it: {error}.",
                RuntimeWarning,
                stacklevel=3,
            )


# ---------------------------------------------------------------- lines


def encode_header(header: dict[str, Any]) -> bytes:
    """The first line."""
    return _line(header)


def encode_end(frames: int) -> bytes:
    """The last line."""
    return _line({"end": True, "frames": frames})


def encode(frame: Frame) -> bytes:
    """A frame's line. What has its usual value is left out of a tensor's table; JSON has no inf and nan: texts."""
    return _line(
        {
            "batch": frame.batch,
            "phase": frame.phase,
            "module": frame.module,
            "kind": frame.kind,
            "call": frame.call,
            "stats": [_table(stat) for stat in frame.stats],
        }
    )


def _table(stat: Stat) -> dict[str, Any]:
    table: dict[str, Any] = {
        "name": stat.name,
        "dtype": stat.dtype,
        "shape": list(stat.shape),
        "abs_min": number(stat.abs_min),
        "abs_max": number(stat.abs_max),
    }
    if stat.nans:
        table["nans"] = True
    if stat.infs:
        table["infs"] = True
    if stat.tiny is not None:
        table["tiny"] = number(stat.tiny)
    if stat.note:
        table["note"] = stat.note
    return table


def number(value: float) -> float | str:
    """A number as JSON can carry it."""
    return value if math.isfinite(value) else str(float(value))


def _line(table: dict[str, Any]) -> bytes:
    return json.dumps(table, separators=(",", ":"), allow_nan=False).encode() + b"\n"
