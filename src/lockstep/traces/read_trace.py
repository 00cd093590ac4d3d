"""Reading traces back, a frame at a time: of a run that ended well, of one that was cut, and of what is no trace."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.traces.frames import Frame, Stat
from lockstep.traces.trace import MARK, VERSION

_FILE = re.compile(r"rank_(\d+)\.(jsonl|parquet)")
_LINE_BYTES = 64 << 20
"""A longer line is no frame; it is not read whole."""
_SHOWN = 5
_BEGINNING = b'{"' + MARK.encode() + b'":'


@dataclass(eq=False)
class Trace:
    """The trace of one rank."""

    path: Path
    rank: int
    header: dict[str, Any]
    """What its first line says; empty when the process ended before it was written."""
    complete: bool = False
    """Whether it was closed; known once all frames were read."""
    notes: list[str] = field(default_factory=list)
    """What the reader had to pass over, in sentences; filled while frames are read."""
    progress: Callable[[], object] | None = None
    """Called at each batch that was read."""

    def __iter__(self) -> Iterator[Frame]:
        self.notes.clear()
        self.complete = False
        if self.path.suffix == ".parquet":
            from lockstep.traces import parquet

            yield from parquet.frames(self.path)
            self.complete = True
        else:
            yield from _lines(self)

    def batches(self) -> Iterator[tuple[int, list[Frame]]]:
        """The frames of each batch together; never more than one batch is held."""
        last = -1
        for batch, frames in itertools.groupby(self, key=lambda frame: frame.batch):
            if batch <= last:
                raise ConfigError(
                    f"{self.path}: batch {batch} comes after batch {last}. Two runs were written into one file; record "
                    "each into a folder of its own."
                )
            last = batch
            yield batch, list(frames)
            if self.progress is not None:
                self.progress()


@dataclass(eq=False)
class Run:
    """The traces of one run, by rank."""

    path: Path
    traces: dict[int, Trace]

    @property
    def world_size(self) -> int:
        """How many ranks the run had: as its traces say, else as many as there are."""
        sizes = [trace.header.get("world_size") for trace in self.traces.values()]
        return max((size for size in sizes if isinstance(size, int)), default=len(self.traces))

    @property
    def notes(self) -> list[str]:
        """What is to be known about the traces that were read."""
        missing = sorted(set(range(self.world_size)) - set(self.traces))
        notes = [note for trace in self.traces.values() for note in trace.notes]
        if missing:
            from lockstep.rundir.format_ranks import name_ranks

            notes.insert(0, f"{self.path}: no trace of {name_ranks(missing, 8)}, of {self.world_size} in all.")
        return notes


# ---------------------------------------------------------------- finding


def open_run(path: str | os.PathLike[str]) -> Run:
    """The traces in a folder, in the ``numerics`` folder of a run directory, or the one file that was named."""
    named = Path(path)
    if named.is_file():
        match = _FILE.fullmatch(named.name)
        return Run(named, _opened({int(match[1]) if match else 0: named}))
    for folder in (named, named / "numerics"):
        files = files_in(folder)
        if files:
            return Run(folder, _opened(files))
    raise ConfigError(f"{named} holds no trace: {_instead(named)} Record one: lockstep numerics record DIR -- train.py")


def _opened(files: dict[int, Path]) -> dict[int, Trace]:
    return {rank: Trace(file, rank, read_header(file)) for rank, file in sorted(files.items())}


def files_in(folder: Path) -> dict[int, Path]:
    """The traces that lie in a folder, by rank."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return {}
    found = {}
    for name in names:  # where both forms lie, the process ended while it made one of the other: the first is whole
        match = _FILE.fullmatch(name)
        if match and int(match[1]) not in found and (folder / name).is_file():  # a pipe would keep us waiting
            found[int(match[1])] = folder / name
    return found


def _instead(named: Path) -> str:
    """What there is in place of a trace."""
    if not named.exists():
        return "it does not exist."
    if not named.is_dir():
        return "it is no folder and no file."
    try:
        names = sorted(os.listdir(named))
    except OSError as error:
        return f"it cannot be read ({error.strerror})."
    if not names:
        return "it is empty."
    deeper = [name for name in names if files_in(named / name)]
    if deeper:
        return f"those of other runs lie in its folders {', '.join(deeper[:_SHOWN])}; name one of them."
    if {"boxes", "logs"} & set(names):
        return "it is the directory of a run whose numbers were not recorded."
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"no rank_N.jsonl and no rank_N.parquet, but {', '.join(names[:_SHOWN])}{more}."


def read_header(file: Path) -> dict[str, Any]:
    """What the first line of a trace says; empty when it was cut before that line was whole."""
    if file.suffix == ".parquet":
        from lockstep.traces import parquet

        return parquet.header(file)
    try:
        with open(file, "rb") as data:
            line = data.readline(1 << 16)
    except OSError as error:
        raise ConfigError(f"The trace {file} cannot be read: {error.strerror}.") from None
    if not line.endswith(b"\n") and (_BEGINNING.startswith(line) or line.startswith(_BEGINNING)):
        try:
            return _checked_header(file, json.loads(line))
        except (ValueError, RecursionError):
            return {}  # cut within its first line
    try:
        table = json.loads(line)
    except (ValueError, RecursionError):
        table = None
    return _checked_header(file, table)


def _checked_header(file: Path, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict) or MARK not in table:
        raise ConfigError(f"{file} is not a trace: its first line does not say that it is one ({MARK!r}).")
    if table[MARK] != VERSION:
        raise ConfigError(
            f"{file} has the form {table[MARK]!r}; this release reads form {VERSION}. Read it with the release that "
            "wrote it."
        )
    return table


# ---------------------------------------------------------------- lines


def _lines(trace: Trace) -> Iterator[Frame]:
    bad: list[int] = []
    read = 0
    torn = False
    with open(trace.path, "rb") as data:
        for count in itertools.count(1):
            line = data.readline(_LINE_BYTES)
            if not line:
                break
            if count == 1:
                continue
            try:
                table = json.loads(line)
                if isinstance(table, dict) and table.get("end") is True:
                    trace.complete = True
                    continue
                frame = decode(table)
            except (ValueError, RecursionError):
                torn = not line.endswith(b"\n")
                bad += [] if torn else [count]
                continue
            read += 1
            yield frame
    if bad:
        trace.notes.append(
            f"{trace.path}: {len(bad)} line{'' if len(bad) == 1 else 's'} could not be read and "
            f"{'was' if len(bad) == 1 else 'were'} passed over, the first is line {bad[0]}."
        )
    if not trace.complete:
        where = f"after {read} frames" + (", in the middle of a line" if torn else "")
        trace.notes.append(f"{trace.path}: the trace was not closed; it ends {where}. Its process was stopped there.")


def decode(table: Any) -> Frame:
    """A frame from its line; fields that a later release adds are passed over. ValueError when it is none."""
    if not isinstance(table, dict) or not isinstance(table.get("stats"), list):
        raise ValueError("no frame")
    return Frame(
        batch=_whole(table, "batch"),
        phase=_text(table, "phase"),
        module=_text(table, "module"),
        kind=_text(table, "kind"),
        call=_whole(table, "call"),
        stats=tuple(_stat(stat) for stat in table["stats"]),
    )


def _stat(table: Any) -> Stat:
    if not isinstance(table, dict) or not isinstance(table.get("shape"), list):
        raise ValueError("no tensor")
    shape = table["shape"]
    if not all(type(size) is int for size in shape):
        raise ValueError("no shape")
    return Stat(
        name=_text(table, "name"),
        dtype=_text(table, "dtype"),
        shape=tuple(shape),
        abs_min=_number(table.get("abs_min")),
        abs_max=_number(table.get("abs_max")),
        nans=table.get("nans") is True,
        infs=table.get("infs") is True,
        tiny=None if table.get("tiny") is None else _number(table["tiny"]),
        note=_text(table, "note") if "note" in table else "",
    )


def _whole(table: dict[str, Any], name: str) -> int:
    value = table.get(name)
    if type(value) is not int:
        raise ValueError(f"{name} is no whole number")
    return value


def _text(table: dict[str, Any], name: str) -> str:
    value = table.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("no number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("no number") from None
