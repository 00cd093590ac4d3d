"""A trace as one page that needs nothing else: modules by batches as a heat map, and the frame behind each cell.

The page holds the largest value of every cell, and the frames of each batch packed by themselves: a browser unpacks
those of the one that is looked at. So thousands of modules in hundreds of batches stay usable.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import IO, Any

from lockstep.errors import ConfigError
from lockstep.host.atomic_file import replacing
from lockstep.rundir.printable import printable
from lockstep.traces.align import Source, by_batch, merged_order
from lockstep.traces.frames import Frame, Stat
from lockstep.traces.trace import number

_NAN, _INF, _THERE, _NUMBERS = 1, 2, 4, 8
"""The bits of a cell, as heatmap.js reads them."""


@dataclass
class _Table:
    """The heat map while it grows: rows are found as batches come."""

    rows: dict[tuple[str, str], int] = field(default_factory=dict)
    """(phase, module) -> number of the row."""
    kinds: list[str] = field(default_factory=list)
    order: list[tuple[str, str]] = field(default_factory=list)
    """The rows as they are executed."""
    batches: list[int] = field(default_factory=list)
    values: list[array[float]] = field(default_factory=list)
    flags: list[bytearray] = field(default_factory=list)

    def begin(self, batch: int, frames: list[tuple[int | None, Frame]]) -> None:
        """A new column."""
        here = list(dict.fromkeys((frame.phase, frame.module) for _, frame in frames))
        kinds = {(frame.phase, frame.module): frame.kind for _, frame in frames}
        for key in here:
            if key not in self.rows:
                self.rows[key] = len(self.rows)
                self.kinds.append(kinds[key])
        if len(self.order) < len(self.rows):
            self.order = merged_order([self.order, here])
        self.batches.append(batch)
        self.values.append(array("f", bytes(4 * len(self.rows))))
        self.flags.append(bytearray(len(self.rows)))

    def add(self, frame: Frame) -> int:
        """One call, in the last column; the number of its row."""
        row = self.rows[frame.phase, frame.module]
        values, flags = self.values[-1], self.flags[-1]
        for stat in frame.stats:
            flags[row] |= (_NAN if stat.nans else 0) | (_INF if stat.infs else 0)
            if not stat.note and math.isfinite(stat.abs_max):
                value = math.log10(stat.abs_max) if stat.abs_max > 0 else -math.inf
                values[row] = max(values[row], value) if flags[row] & _NUMBERS else value
                flags[row] |= _NUMBERS
        flags[row] |= _THERE
        return row

    def columns(self) -> tuple[bytes, bytes]:
        """All values and all flags, column after column, each as long as there are rows."""
        rows = len(self.rows)
        values = b"".join(column.tobytes().ljust(4 * rows, b"\0") for column in self.values)
        return values, b"".join(bytes(column).ljust(rows, b"\0") for column in self.flags)


def write_page(
    traces: Mapping[int, Source],
    out: Path,
    *,
    title: str,
    notes: Callable[[], list[str]] = list,
) -> tuple[int, int]:
    """Write the page of these ranks to ``out``; how many rows and batches it has.

    Cells hold the largest value on any rank. ``notes`` is asked at the end, when everything was read.
    """
    table = _Table()
    try:
        with replacing(out) as draft, open(draft, "w", encoding="utf-8") as file:
            _begin(file, title)
            for batch, parts in by_batch(traces):
                frames = [(rank, frame) for rank, part in parts.items() for frame in part.frames]
                table.begin(batch, frames)
                packed = [
                    [table.add(frame), rank, frame.call, [_plain(stat) for stat in frame.stats]]
                    for rank, frame in frames
                ]
                _embed(file, f"batch-{len(table.batches) - 1}", json.dumps(packed, separators=(",", ":")).encode())
            if not table.batches:
                raise ConfigError(
                    f"{title}: the trace holds no frame, so there is nothing to draw. " + " ".join(notes())
                )
            _end(file, table, sorted(traces), notes())
    except OSError as error:
        raise ConfigError(f"The page {out} cannot be written: {error.strerror or error}.") from None
    return len(table.rows), len(table.batches)


def _plain(stat: Stat) -> list[Any]:
    tiny = None if stat.tiny is None else number(stat.tiny)
    lowest, largest = number(stat.abs_min), number(stat.abs_max)
    return [printable(stat.name), stat.dtype, stat.shape, lowest, largest, stat.nans, stat.infs, tiny, stat.note]


def _asset(name: str) -> str:
    return resources.files("lockstep.traces").joinpath("page").joinpath(name).read_text(encoding="utf-8")


def _embed(file: IO[str], name: str, data: bytes) -> None:
    packed = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
    file.write(f'<script type="text/plain" id="{name}">{packed}</script>\n')


def _begin(file: IO[str], title: str) -> None:
    title = html.escape(printable(title))
    file.write(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Nothing is fetched from anywhere; the browser holds us to it.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">\n"
        f"<title>{title} - numbers</title>\n<style>\n{_asset('heatmap.css')}</style>\n</head>\n<body>\n"
        f"<h1>{title}: abs max of modules by batches</h1>\n"
    )


def _end(file: IO[str], table: _Table, ranks: list[int], notes: list[str]) -> None:
    bad = sum(1 for column in table.flags for cell in column if cell & (_NAN | _INF))
    where = f"{len(table.rows)} rows, {len(table.batches)} batches, {len(ranks)} rank{'' if len(ranks) == 1 else 's'}"
    file.write(f'<p class="faint">{where}; {bad or "no"} cell{"" if bad == 1 else "s"} with nan or inf.</p>\n')
    if notes:
        file.write(f"<ul>{''.join(f'<li>{html.escape(printable(note))}</li>' for note in notes)}</ul>\n")
    file.write(_BODY)
    rows: list[dict[str, str]] = [{}] * len(table.rows)
    for (phase, module), row in table.rows.items():
        rows[row] = {"name": printable(module), "phase": phase, "kind": printable(table.kinds[row])}
    index = {"rows": rows, "order": [table.rows[key] for key in table.order], "batches": table.batches, "ranks": ranks}
    text = json.dumps(index, separators=(",", ":")).replace("<", "\\u003c")
    file.write(f'<script type="application/json" id="index">{text}</script>\n')
    values, flags = table.columns()
    _embed(file, "values", values)
    _embed(file, "flags", flags)
    file.write(f"<script>\n{_asset('heatmap.js')}</script>\n</body>\n</html>\n")


_BODY = """\
<form id="choice" role="search" aria-label="Rows">
<label>Module <input type="search" id="filter" placeholder="part of a name"></label>
<label>Phase <select id="phase"><option value="">all</option><option>forward</option><option>backward</option>
<option value="optimizer">optimizer step</option></select></label>
<label><input type="checkbox" id="bad"> only rows with nan or inf</label>
<button type="button" id="first-bad">Go to the first nan or inf</button>
</form>
<div id="legend"><span id="low"></span><span id="scale" aria-hidden="true"></span><span id="high"></span>
<span class="key bad">N</span> nan <span class="key bad">&infin;</span> inf <span class="key">0</span> all zero
<span class="faint">Arrow keys move, Enter shows the frame, Escape leads back.</span></div>
<p id="none" hidden>No row fits.</p>
<noscript><p>The heat map is drawn by JavaScript, which is switched off.</p></noscript>
<div id="grid" role="grid" aria-label="Largest absolute value of each module in each batch" aria-readonly="true"
tabindex="0"><div id="window" role="presentation"></div><div id="space" role="presentation"></div></div>
<p id="status" role="status" class="faint"></p>
<section id="frame" tabindex="-1" aria-label="Frame" hidden></section>
"""
