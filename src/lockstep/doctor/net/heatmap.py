"""What is drawn of a report, whoever draws it: a map of the pairs for each thing that was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lockstep.doctor.net import findings, quality, units
from lockstep.doctor.net.results import Link, NetReport

_FULL = math.log(4)
"""The strongest colour is for what is at least four times as bad as the best: what differs little looks alike."""
_GOOD, _BAD = (200, 232, 205), (246, 170, 100)
OUT = "#d03030"
"""Pairs that cannot talk, and the edge of those that stand out."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One pair, one way."""

    row: int
    """Its place, from the top: where it comes from."""
    column: int
    """Its place, from the left: where it goes to."""
    text: str
    """What was measured, as people read it."""
    colour: str | None
    """From pale green to orange; red for a pair that cannot talk, None for one that was not measured."""
    kind: Literal["fine", "marked", "broken"]
    """Whether it stands out, or is not there at all."""
    tip: str
    """The same with more words."""


@dataclass(frozen=True, kw_only=True)
class Map:
    """All pairs."""

    title: str
    rows: tuple[str, ...]
    """The name of each rank."""
    columns: tuple[str, ...]
    """The number of each rank."""
    cells: tuple[Cell, ...]
    """Each pair, both ways."""


Value = Callable[[Link, bool], float | None]


def of(report: NetReport) -> Iterator[Map]:
    """A map for each thing that was measured."""
    if report.links:
        yield _map(report, "Latency one way", lambda link, forth: link.latency, units.micro, high_is_bad=True)
    if any(link.forth is not None for link in report.links):
        yield _map(
            report,
            "Rate over one TCP stream, row to column",
            lambda link, forth: link.forth if forth else link.back,
            units.rate,
            high_is_bad=False,
        )
    if any(link.device_rate is not None for link in report.links):
        yield _map(
            report,
            "Rate by send and receive on the devices",
            lambda link, forth: link.device_rate,
            units.rate,
            high_is_bad=False,
        )


def _map(
    report: NetReport, title: str, value: Value, shown: Callable[[float | None], str], *, high_is_bad: bool
) -> Map:
    known = [found for link in report.links for forth in (True, False) if (found := value(link, forth))]
    best = math.log((min if high_is_bad else max)(known)) if known else 0.0
    span = max([_FULL, *(abs(math.log(found) - best) for found in known)])
    by_pair = {(link.a, link.b): link for link in report.links}
    marked, broken = quality.marks(report), findings.broken_pairs(report)
    cells = []
    for row, source in enumerate(report.members):
        for column, target in enumerate(report.members):
            if source.rank == target.rank:
                continue
            pair = (min(source.rank, target.rank), max(source.rank, target.rank))
            colour, text = (OUT, "failed") if pair in broken else (None, "-")
            if (link := by_pair.get(pair)) is not None and pair not in broken:
                found = value(link, source.rank < target.rank)
                colour, text = shade(abs(math.log(found) - best) / span if found else 0.0), shown(found)
            tip = f"{source.rank} to {target.rank}: {text}" + "".join(f"; {mark}" for mark in marked.get(pair, []))
            kind: Literal["fine", "marked", "broken"] = "marked" if pair in marked else "fine"
            cells.append(
                Cell(
                    row=row,
                    column=column,
                    text=text,
                    colour=colour,
                    kind="broken" if pair in broken else kind,
                    tip=tip,
                )
            )
    return Map(
        title=title,
        rows=tuple(f"{member.rank} {member.host}" for member in report.members),
        columns=tuple(str(member.rank) for member in report.members),
        cells=tuple(cells),
    )


def shade(share: float) -> str:
    """From good (pale green) to bad (orange)."""
    red, green, blue = (round(one + (other - one) * share) for one, other in zip(_GOOD, _BAD, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"
