"""Traces as Parquet, a row per tensor: for DuckDB, pandas and their like. Needs pyarrow.

A Parquet file that was not closed cannot be read at all. So a trace is written in lines, and made into Parquet when it
is whole.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.host.atomic_file import replacing
from lockstep.traces.frames import Frame, Stat

_ROWS = 16384
_HEADER = b"lockstep"


def require() -> None:
    """Raise unless pyarrow is there."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed. Install it (pip install 'torch-lockstep[parquet]'), or "
            "leave the form out: traces are then JSON lines."
        ) from None


def convert(file: Path) -> Path:
    """Make a whole trace of lines into Parquet beside it, and remove the lines."""
    import pyarrow as arrow
    from pyarrow import parquet

    from lockstep.traces.read_trace import Trace, read_header

    header = read_header(file)
    target = file.with_suffix(".parquet")
    schema = _schema(arrow).with_metadata({_HEADER: json.dumps(header).encode()})
    rows = _rows(Trace(file, header.get("rank", 0), header))
    with replacing(target) as draft, parquet.ParquetWriter(draft, schema, compression="zstd") as writer:
        while chunk := list(itertools.islice(rows, _ROWS)):
            writer.write_table(arrow.Table.from_pylist(chunk, schema=schema))
    file.unlink()
    return target


def header(file: Path) -> dict[str, Any]:
    """What the trace says about itself."""
    with _opened(file) as opened:
        metadata = opened.schema_arrow.metadata or {}
    try:
        table = json.loads(metadata[_HEADER])
    except (KeyError, ValueError, RecursionError):
        raise ConfigError(f"{file} is Parquet, but not a trace: it was not written by lockstep.") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{file} is Parquet, but not a trace: it was not written by lockstep.")
    return table


def frames(file: Path) -> Iterator[Frame]:
    """The frames of a trace, in order; some thousand rows are held at a time."""
    with _opened(file) as opened:
        columns = [field.name for field in _schema(_arrow())]
        try:
            rows = (row for chunk in opened.iter_batches(_ROWS, columns=columns) for row in chunk.to_pylist())
            for _, together in itertools.groupby(rows, key=lambda row: row["frame"]):
                yield _frame(list(together))
        except (KeyError, TypeError, OSError, _arrow().ArrowException) as error:
            raise ConfigError(f"{file} cannot be read to its end: {error}.") from None


def _arrow() -> Any:
    import pyarrow

    return pyarrow


def _opened(file: Path) -> Any:
    require()
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(str(file))
    except (OSError, _arrow().ArrowException) as error:
        raise ConfigError(f"{file} is not a trace: Parquet cannot be read from it ({error}).") from None


def _schema(arrow: Any) -> Any:
    word = arrow.dictionary(arrow.int32(), arrow.string())
    return arrow.schema(
        [
            ("frame", arrow.int64()),
            ("batch", arrow.int64()),
            ("phase", word),
            ("module", word),
            ("kind", word),
            ("call", arrow.int64()),
            ("tensor", word),
            ("dtype", word),
            ("shape", arrow.list_(arrow.int64())),
            ("abs_min", arrow.float64()),
            ("abs_max", arrow.float64()),
            ("nans", arrow.bool_()),
            ("infs", arrow.bool_()),
            ("tiny", arrow.float64()),
            ("note", word),
        ]
    )


def _rows(trace: Iterator[Frame] | Any) -> Iterator[dict[str, Any]]:
    for number, frame in enumerate(trace):
        common = {
            "frame": number,
            "batch": frame.batch,
            "phase": frame.phase,
            "module": frame.module,
            "kind": frame.kind,
            "call": frame.call,
        }
        for stat in frame.stats:
            yield {
                **common,
                "tensor": stat.name,
                "dtype": stat.dtype,
                "shape": list(stat.shape),
                "abs_min": stat.abs_min,
                "abs_max": stat.abs_max,
                "nans": stat.nans,
                "infs": stat.infs,
                "tiny": stat.tiny,
                "note": stat.note,
            }
        if not frame.stats:
            yield common  # a call that handled no tensor has a row without one


def _frame(rows: list[dict[str, Any]]) -> Frame:
    first = rows[0]
    return Frame(
        batch=first["batch"],
        phase=first["phase"],
        module=first["module"],
        kind=first["kind"],
        call=first["call"],
        stats=tuple(
            Stat(
                name=row["tensor"],
                dtype=row["dtype"],
                shape=tuple(row["shape"]),
                abs_min=row["abs_min"],
                abs_max=row["abs_max"],
                nans=row["nans"],
                infs=row["infs"],
                tiny=row["tiny"],
                note=row["note"],
            )
            for row in rows
            if row["tensor"] is not None
        ),
    )
