"""The report of the network as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lockstep.doctor import table
from lockstep.doctor.finding import Finding, to_json
from lockstep.doctor.net import findings as network_findings
from lockstep.doctor.net import quality, units
from lockstep.doctor.net.results import Link, NetReport, RankInfo
from lockstep.rundir.format_ranks import name_ranks

WIDEST = 16
"""Ranks up to which the matrices fit on a screen; JSON and the page have them at any size."""


def plain(report: NetReport, findings: Sequence[Finding]) -> dict[str, Any]:
    """All of it, for JSON."""
    marked = quality.marks(report)
    return {
        **to_json(findings),
        "ranks": [{**_public(member), "ok": _well(report, member)} for member in report.members],
        "missing": list(report.missing),
        "failed_connections": [contact.plain() for contact in report.contacts],
        "links": [
            {**link.plain(), **_shares(report, link), "marks": marked.get((link.a, link.b), [])}
            for link in report.links
        ],
        "all_reduce": {"ranks": list(report.group), "points": [point.plain() for point in report.points]},
        "memory_copy": _copies(report),
    }


def _public(member: RankInfo) -> dict[str, Any]:
    hidden = ("token", "findings", "machine", "port")
    return {name: value for name, value in member.plain().items() if name not in hidden}


def _shares(report: NetReport, link: Link) -> dict[str, Any]:
    """What the hardware should give, and how much of it the slower direction does."""
    nominal, of = reference(report, link)
    rates = [value for value in (link.forth, link.back) if value is not None]
    share = min(rates) / nominal if rates and nominal else None
    return {"should_give": nominal, "compared_with": of, "share": share}


def reference(report: NetReport, link: Link) -> tuple[float | None, str]:
    """What a line cannot exceed: a copy in memory inside a node, the slower interface between two."""
    by_rank = {member.rank: member for member in report.members}
    if by_rank[link.a].host == by_rank[link.b].host:
        return _copies(report).get(by_rank[link.a].host), "memory copy"
    return quality.should_give(link, by_rank), "nominal"


def _copies(report: NetReport) -> dict[str, float]:
    by_rank = {member.rank: member for member in report.members}
    return {
        by_rank[outcome.rank].host: outcome.copy
        for outcome in report.outcomes
        if outcome.copy is not None and outcome.rank in by_rank
    }


def lines(report: NetReport, findings: Sequence[Finding]) -> Iterator[str]:
    """All of it, for the terminal."""
    broken = network_findings.broken_pairs(report)
    if report.links and len(report.members) <= WIDEST:
        yield from _matrix(report, "Latency, one way (rows to columns)", _latency)
        if any(link.forth is not None for link in report.links):
            yield from _matrix(report, "Rate over one TCP stream (rows to columns)", _rate)
            yield from _matrix(report, "The same as a part of what the hardware should give", _part)
        if any(link.device_rate is not None for link in report.links):
            yield from _matrix(report, "Latency by send and receive on the devices", _device_latency)
            yield from _matrix(report, "Rate by send and receive on the devices", _device_rate)
        yield "  * stands out; see below. Inside a node the hardware is a copy in memory; between two, the slower"
        yield "  interface. A dash where it does not say what it can do."
        yield ""
    elif report.links:
        yield f"{len(report.members)} ranks: the matrices are in --json and --html."
        if len(report.links) < len(report.members) * (len(report.members) - 1) // 2 - len(broken):
            yield "Between nodes one rank of each was measured: with so many, it stands for the others."
        yield ""
    if report.points:
        yield from _curve(report)
    yield from table.lines(findings)
    yield ""
    yield from verdicts(report)


def verdicts(report: NetReport) -> Iterator[str]:
    """One line for each rank: OK, or why not."""
    hosts = max((len(member.host) for member in report.members), default=0)
    for member in report.members:
        well = _well(report, member)
        why = "" if well else f"  {_trouble(report, member)}"
        yield f"rank {member.rank:<4} {member.host:<{hosts}}  {member.device:<8} {'OK' if well else 'FAILED'}{why}"
    for rank in report.missing:
        yield f"rank {rank:<4} {'?':<{hosts}}  {'':<8} FAILED  it did not come"


def _well(report: NetReport, member: RankInfo) -> bool:
    return not _trouble(report, member)


def _trouble(report: NetReport, member: RankInfo) -> str:
    if member.problem:
        return member.problem
    failed = {contact.target for contact in report.contacts if contact.source == member.rank}
    failed |= {contact.source for contact in report.contacts if contact.target == member.rank}
    failed |= {link.a + link.b - member.rank for link in report.links if link.error and member.rank in (link.a, link.b)}
    if failed:
        return f"it cannot talk to {name_ranks(failed, network_findings.FEW)}"
    return next((outcome.error for outcome in report.outcomes if outcome.rank == member.rank), "")


# --- tables ----------------------------------------------------------------------------------------------------------

Cell = Callable[[NetReport, Link, bool], str]


def _latency(report: NetReport, link: Link, forth: bool) -> str:
    return units.micro(link.latency)


def _rate(report: NetReport, link: Link, forth: bool) -> str:
    return units.rate(link.forth if forth else link.back)


def _part(report: NetReport, link: Link, forth: bool) -> str:
    return units.percent(link.forth if forth else link.back, reference(report, link)[0])


def _device_latency(report: NetReport, link: Link, forth: bool) -> str:
    return units.micro(link.device_latency)


def _device_rate(report: NetReport, link: Link, forth: bool) -> str:
    return units.rate(link.device_rate)


def _matrix(report: NetReport, title: str, cell: Cell) -> Iterator[str]:
    ranks = [member.rank for member in report.members]
    by_pair = {(link.a, link.b): link for link in report.links}
    marked, broken = quality.marks(report), network_findings.broken_pairs(report)

    def text(row: int, column: int) -> str:
        if row == column:
            return "."
        pair = (min(row, column), max(row, column))
        link = by_pair.get(pair)
        if link is None or pair in broken:
            return "FAILED" if pair in broken else "-"
        return cell(report, link, row < column) + ("*" if pair in marked else "")

    rows = [[text(row, column) for column in ranks] for row in ranks]
    width = max(6, *(len(word) for row in rows for word in row)) + 2
    names = max(len(_label(member)) for member in report.members)
    yield title
    yield " " * (names + 2) + "".join(f"{rank:>{width}}" for rank in ranks)
    for member, row in zip(report.members, rows, strict=True):
        yield f"  {_label(member):<{names}}" + "".join(f"{word:>{width}}" for word in row)
    yield ""


def _label(member: RankInfo) -> str:
    return f"{member.rank} {member.host}"


def _curve(report: NetReport) -> Iterator[str]:
    yield f"all_reduce on {len(report.group)} ranks"
    yield f"  {'size':>8}  {'time':>10}  {'each link carries':>18}"
    for point in report.points:
        if point.seconds is None:
            yield f"  {units.amount(point.size):>8}  left out: {point.note}"
        else:
            yield f"  {units.amount(point.size):>8}  {units.micro(point.seconds):>10}  {units.rate(point.rate):>18}"
    yield ""
