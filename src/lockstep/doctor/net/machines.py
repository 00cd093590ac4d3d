"""What the checks of each node have found, side by side: what is the same on several is told once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from lockstep.doctor.finding import Finding
from lockstep.doctor.net.results import RankInfo

_NAMES = 6
MANY = 4
"""Nodes that one cannot talk to from which on it is the one to look at."""
_ROWS = 2
"""Rows of one check and status that are shown in full, where more nodes have something of their own to say."""


def findings(members: Sequence[RankInfo]) -> Iterator[Finding]:
    """Check by check, one finding for all nodes that say the same."""
    hosts: dict[str, list[str]] = {}
    firsts: dict[str, Finding] = {}
    for member in members:
        for plain in member.findings:
            finding = Finding.of(plain)
            key = repr((finding.check, finding.status, finding.what, finding.fix))
            hosts.setdefault(key, []).append(member.host)
            firsts.setdefault(key, finding)
    order = {check: number for number, check in enumerate(dict.fromkeys(each.check for each in firsts.values()))}
    machines = len({member.host for member in members})
    for key in sorted(firsts, key=lambda key: order[firsts[key].check]):
        where = f"all {machines} nodes" if len(hosts[key]) == machines > 1 else named(hosts[key])
        finding = firsts[key]
        yield replace(finding, what=f"{where}: {finding.what}", data={**finding.data, "hosts": hosts[key]})


def brief(found: Sequence[Finding]) -> Iterator[Finding]:
    """For the screen: of the rows that say the same of many nodes, each with its own figures, the first ones."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in found:
        alike.setdefault((finding.check, finding.status), []).append(finding)
    for (_, status), rows in alike.items():
        shown = rows if len(rows) <= _ROWS + 1 else rows[:_ROWS]
        yield from shown
        if rest := [host for finding in rows[len(shown) :] for host in finding.data["hosts"]]:
            what = f"{named(rest)}: {status} too, each with figures of its own, which --json has"
            yield replace(rows[0], what=what, why="", fix="", data={"hosts": rest})


def cut_off(apart: Set[frozenset[str]]) -> Iterator[tuple[str, list[str]]]:
    """Nodes that many others cannot talk to, the worst first, each with those others that were not named before."""
    partners: dict[str, set[str]] = defaultdict(set)
    for hosts in apart:
        for host in hosts:
            partners[host] |= hosts - {host}
    while partners:
        worst = max(sorted(partners), key=lambda host: len(partners[host]))
        others = partners.pop(worst)
        if len(others) < MANY:
            return
        yield worst, sorted(others)
        for other in others:
            partners[other].discard(worst)


def named(hosts: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    return ", ".join(hosts[:_NAMES]) + (f" and {len(hosts) - _NAMES} more" if len(hosts) > _NAMES else "")
