"""The report of the network as one picture (PNG, or what else the file's ending names), for a chat or a ticket.

Drawn by matplotlib, which is an extra: the page needs nothing, and can do more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.doctor.finding import Finding
from lockstep.doctor.net import heatmap, units
from lockstep.doctor.net.results import NetReport
from lockstep.doctor.table import summary
from lockstep.errors import ConfigError

MOST = 64
"""Ranks up to which each pair is a square that can be told from the next one."""
_WORDS = 16
"""Ranks up to which there is room for figures in the squares."""


def require() -> None:
    """Raise where nothing can be drawn; asked before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--png needs matplotlib, which is not installed: pip install 'torch-lockstep[png]'. --html needs nothing."
        )


def draw(report: NetReport, findings: Sequence[Finding], path: Path) -> None:
    """Draw the maps below each other, then the all-reduce curve."""
    from matplotlib.figure import Figure

    found = list(heatmap.of(report)) if len(report.members) <= MOST else []
    points = [point for point in report.points if point.rate]
    count = max(1, len(found) + (len(points) > 1))
    side = min(14.0, max(4.5, 0.75 * len(report.members) + 2))
    heights = [side] * len(found) + [4.0] * (count - len(found))
    figure = Figure(figsize=(max(8.0, side + 1), 1 + sum(heights)), layout="constrained")
    figure.suptitle(f"lockstep doctor net: {len(report.members)} ranks; {summary(findings)}")
    axes = figure.subplots(count, 1, squeeze=False, height_ratios=heights)[:, 0]
    for each, axis in zip(found, axes, strict=False):
        _map(each, axis)
    if len(points) > 1:
        _curve(report, axes[-1])
    elif not found:
        axes[0].set_axis_off()
        axes[0].text(0.5, 0.5, f"nothing was measured that can be drawn ({MOST} ranks at most)", ha="center")
    figure.savefig(path, dpi=110)


def _map(drawn: heatmap.Map, axis: Any) -> None:
    from matplotlib.patches import Rectangle

    size = len(drawn.rows)
    for cell in drawn.cells:
        edge, width = (heatmap.OUT, 2.0) if cell.kind == "marked" else ("#aaaaaa", 0.4)
        square = Rectangle((cell.column, cell.row), 1, 1, facecolor=cell.colour or "#eeeeee", edgecolor=edge)
        square.set_linewidth(width)
        # Edges of those that stand out lie above the thin ones of their neighbours.
        square.set_zorder(3 if cell.kind == "marked" else 2)
        axis.add_patch(square)
        if size <= _WORDS:
            ink = "white" if cell.kind == "broken" else "black"
            middle = (cell.column + 0.5, cell.row + 0.5)
            axis.text(*middle, cell.text, ha="center", va="center", fontsize=7, color=ink, zorder=4)
    axis.set(xlim=(0, size), ylim=(size, 0), aspect="equal", title=drawn.title)
    places = [place + 0.5 for place in range(size)]
    axis.set_xticks(places, drawn.columns, fontsize=8)
    axis.set_yticks(places, drawn.rows, fontsize=8)
    axis.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    for side in axis.spines.values():
        side.set_visible(False)


def _curve(report: NetReport, axis: Any) -> None:
    points = [point for point in report.points if point.rate]
    sizes, rates = [point.size for point in points], [point.rate or 1.0 for point in points]
    axis.loglog(sizes, rates, marker="o")
    decades = range(math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates))) + 1)
    axis.set_yticks([10.0**power for power in decades], [units.rate(10.0**power) for power in decades], fontsize=8)
    axis.set_xticks(sizes, [units.amount(size) for size in sizes], fontsize=8)
    axis.minorticks_off()
    axis.grid(alpha=0.4)
    axis.set_title(f"all_reduce on {len(report.group)} ranks: what each link carries")
