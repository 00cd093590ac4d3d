"""The report of the network as one page that needs nothing else: heat maps of the pairs, and the all-reduce curve."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from lockstep.doctor.finding import Finding
from lockstep.doctor.net import heatmap, units
from lockstep.doctor.net.results import NetReport
from lockstep.rundir.printable import printable

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
  color: #1c1c1c; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .25rem .6rem; text-align: left; vertical-align: top }
.error { color: #a40000; font-weight: 600 } .warning { color: #8a5300; font-weight: 600 } .ok { color: #156315 }
code { background: #f1f1f1; padding: 0 .25rem } svg { max-width: 100%; height: auto } .why { color: #555 }
@media (prefers-color-scheme: dark) {
  body { background: #16181b; color: #e6e6e6 } code { background: #2a2d31 } .why { color: #aaa }
  .error { color: #ff8080 } .warning { color: #f0b050 } .ok { color: #7fd07f } svg text { fill: #e6e6e6 } }
"""
_CELL = 64
_EDGE = 120


def render(report: NetReport, findings: Sequence[Finding]) -> str:
    """The whole page."""
    hosts = sorted({member.host for member in report.members})
    title = f"lockstep doctor net: {len(report.members)} ranks on {', '.join(hosts)}"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{_text(title)}</title><style>{_STYLE}</style><h1>{_text(title)}</h1>",
        *_findings(findings),
    ]
    for each in heatmap.of(report):
        parts += _map(each)
    parts += _curve(report)
    return "\n".join(parts) + "</html>\n"


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    yield "<h2>Findings</h2><table>"
    for finding in findings:
        more = ""
        if finding.status in ("warning", "error"):
            more += f"<div class=why>{_text(finding.why)}</div>" if finding.why else ""
            more += f"<div>To do: <code>{_text(finding.fix)}</code></div>" if finding.fix else ""
        yield (
            f"<tr><td class={finding.status}>{finding.status}<td>{_text(finding.check)}"
            f"<td>{_text(finding.what)}{more}</tr>"
        )
    yield "</table>"


def _map(drawn: heatmap.Map) -> Iterator[str]:
    """A square for each pair: pale to strong on a logarithmic scale, red where they cannot talk."""
    width, height = _EDGE + _CELL * len(drawn.columns), 30 + _CELL * len(drawn.rows)
    yield f"<h2>{_text(drawn.title)}</h2>"
    yield f"<svg viewBox='0 0 {width} {height}' width={width} role=img aria-label='{_text(drawn.title)}'>"
    for column, name in enumerate(drawn.columns):
        yield f"<text x={_EDGE + _CELL * column + _CELL / 2} y=20 text-anchor=middle font-size=12>{_text(name)}</text>"
    for row, name in enumerate(drawn.rows):
        yield f"<text x=4 y={30 + _CELL * row + _CELL / 2 + 4} font-size=12>{_text(name[:18])}</text>"
    yield from map(_square, drawn.cells)
    yield "</svg>"


def _square(cell: heatmap.Cell) -> str:
    left, top = _EDGE + _CELL * cell.column, 30 + _CELL * cell.row
    edge = f"'{heatmap.OUT}' stroke-width=3" if cell.kind == "marked" else "'#8884'"
    ink = "#fff" if cell.kind == "broken" else "#111"
    middle = f"x={left + _CELL / 2} y={top + _CELL / 2 + 4}"
    return (
        f"<g><title>{_text(cell.tip)}</title><rect x={left + 1} y={top + 1} width={_CELL - 2} height={_CELL - 2} rx=4 "
        f"fill='{cell.colour or '#8882'}' stroke={edge} />"
        f"<text {middle} text-anchor=middle font-size=10 style='fill:{ink}'>{_text(cell.text)}</text></g>"
    )


def _curve(report: NetReport) -> Iterator[str]:
    points = [point for point in report.points if point.rate]
    if len(points) < 2:
        return
    width, height, left, bottom = 640, 300, 90, 40
    sizes = [math.log2(point.size) for point in points]
    rates = [math.log10(point.rate or 1) for point in points]
    floor, top = math.floor(min(rates)), math.ceil(max(rates))

    def place(size: float, rate: float) -> tuple[float, float]:
        x = left + (size - sizes[0]) / (sizes[-1] - sizes[0]) * (width - left - 20)
        y = height - bottom - (rate - floor) / max(1, top - floor) * (height - bottom - 20)
        return round(x, 1), round(y, 1)

    yield f"<h2>all_reduce on {len(report.group)} ranks: what each link carries</h2>"
    yield f"<svg viewBox='0 0 {width} {height}' width={width} role=img aria-label='all_reduce by size'>"
    for power in range(floor, top + 1):
        _, y = place(sizes[0], power)
        yield f"<line x1={left} x2={width - 20} y1={y} y2={y} stroke='#8884' />"
        yield f"<text x={left - 8} y={y + 4} text-anchor=end font-size=11>{units.rate(10.0**power)}</text>"
    track = " ".join(f"{x},{y}" for x, y in map(place, sizes, rates))
    yield f"<polyline points='{track}' fill=none stroke='#2a6fb0' stroke-width=2 />"
    for point, size, rate in zip(points, sizes, rates, strict=True):
        x, y = place(size, rate)
        tip = f"{units.amount(point.size)}: {units.micro(point.seconds)}, {units.rate(point.rate)}"
        yield f"<circle cx={x} cy={y} r=4 fill='#2a6fb0'><title>{_text(tip)}</title></circle>"
        yield f"<text x={x} y={height - bottom + 18} text-anchor=middle font-size=10>{units.amount(point.size)}</text>"
    yield "</svg>"


def _text(text: str) -> str:
    return html.escape(printable(text), quote=True)
