"""Reports written by hand: what the tests of judging and showing start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from lockstep.doctor.net.results import Contact, Link, NetReport, Point, RankInfo, RankResult

VERSIONS = {"torch": "2.13.0", "python": "3.11.7", "lockstep": "0.1"}


def healthy(hosts: Sequence[str], **link: Any) -> NetReport:
    """One rank for each of the hosts, all well; 10 Gbit/s between them."""
    given = {"latency": 30e-6, "forth": 1.1e9, "back": 1.1e9, "offset": 0.0, "uncertain": 30e-6, **link}
    ranks = range(len(hosts))
    return NetReport(
        members=[
            RankInfo(
                rank=rank,
                host=host,
                address=f"10.0.0.{rank + 1}",
                interface="eth0",
                speed=10_000,
                others={"eth0": [f"10.0.0.{rank + 1}"]},
                versions=VERSIONS,
            )
            for rank, host in enumerate(hosts)
        ],
        missing=[],
        tried=list(ranks),
        links=[Link(a=a, b=b, **given) for a, b in combinations(ranks, 2)],
        outcomes=[RankResult(rank=rank, checked=True, copy=8e9) for rank in ranks],
        group=list(ranks),
        points=[
            Point(size=1024, seconds=1e-4, rate=1e7),
            Point(size=4096, seconds=1.5e-4, rate=3e7),
            Point(size=16384, note="the time budget is used up"),
        ],
    )


def with_link(report: NetReport, a: int, b: int, **changes: Any) -> NetReport:
    """One line changed."""
    return replace(
        report, links=[replace(link, **changes) if (link.a, link.b) == (a, b) else link for link in report.links]
    )


def with_contact(report: NetReport, source: int, target: int, error: str, **more: Any) -> NetReport:
    """One try to connect that failed."""
    failed = Contact(source=source, target=target, error=error, **{"through": "eth0", **more})
    return replace(report, contacts=[*report.contacts, failed])


def with_member(report: NetReport, rank: int, **changes: Any) -> NetReport:
    """One rank changed."""
    return replace(report, members=[replace(each, **changes) if each.rank == rank else each for each in report.members])
