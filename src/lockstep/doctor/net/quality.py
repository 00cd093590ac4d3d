"""How good the lines are: those that break, those that stand out from the others or from what the hardware can do."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from lockstep.doctor.finding import Finding, Status
from lockstep.doctor.net.links import SILENT
from lockstep.doctor.net.machines import cut_off, named
from lockstep.doctor.net.results import Link, NetReport, RankInfo
from lockstep.doctor.net.schedule import Pair
from lockstep.doctor.net.units import micro, percent, rate

SLOWER = 3.0
"""A latency of this many times the middle one is marked."""
LESS = 0.5
"""So is a rate below this part of the middle one."""
ENOUGH = 3
"""Lines of one kind from which on there is a middle that means something."""
NOISE = {True: 200e-6, False: 50e-6}
"""Seconds by which latencies may differ, inside a node and between two, when it has other things to do."""
FAR = 1e-3
"""Seconds of latency between nodes from which on every collective of small tensors is slow."""
STREAM = 10_000
"""Mbit/s that one stream of one process can be expected to give, however fast the hardware."""
EXPECTED = 0.3
"""The part of what the hardware should give below which a line is marked."""
LOST = 0.01
"""The share of packets that have to be sent again from which on a line is marked."""


def findings(report: NetReport) -> Iterator[Finding]:
    """Lines that broke, then lines that are slow; or that none is."""
    yield from broken(report)
    yield from _slow(report)


def marks(report: NetReport) -> dict[tuple[int, int], list[str]]:
    """What is wrong with which line, in words."""
    by_rank = {member.rank: member for member in report.members}
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    whole = [link for link in report.links if not link.error]
    for inside in (True, False):
        links = [link for link in whole if (by_rank[link.a].host == by_rank[link.b].host) == inside]
        for link, text in _against_the_middle(links, NOISE[inside]):
            found[link.a, link.b].append(text)
        if not inside:
            for link, text in _against_the_hardware(links, by_rank):
                found[link.a, link.b].append(text)
    return dict(found)


def _against_the_middle(links: Sequence[Link], noise: float) -> Iterator[tuple[Link, str]]:
    late = [link for link in links if link.latency is not None]
    if len(late) >= ENOUGH:
        middle = statistics.median(link.latency or 0 for link in late)
        for link in late:
            if (link.latency or 0) > max(SLOWER * middle, middle + noise):
                yield link, f"latency {micro(link.latency)}, {(link.latency or 0) / middle:.0f} times the median"
    for name in ("forth", "back"):
        rated = [(link, getattr(link, name)) for link in links if getattr(link, name) is not None]
        if len(rated) < ENOUGH:
            continue
        middle = statistics.median(value for _, value in rated)
        for link, value in rated:
            if value < LESS * middle:
                way = f"{link.a} to {link.b}" if name == "forth" else f"{link.b} to {link.a}"
                yield link, f"{rate(value)} from rank {way}, {100 * value / middle:.0f}% of the median"


def _against_the_hardware(links: Sequence[Link], by_rank: dict[int, RankInfo]) -> Iterator[tuple[Link, str]]:
    for link in links:
        if link.latency is not None and link.latency > FAR:
            yield link, f"latency {micro(link.latency)}, far above what a local network has"
        nominal = should_give(link, by_rank)
        stream = STREAM * 125_000.0
        for value, lost, way in (
            (link.forth, link.lost_forth, f"{link.a} to {link.b}"),
            (link.back, link.lost_back, f"{link.b} to {link.a}"),
        ):
            # A line that is as fast as can be has lost what a busy machine could not take.
            if lost >= LOST and (value is None or value < min(nominal or stream, stream)):
                yield link, f"{percent(lost, 1.0)} of the packets from rank {way} were lost on the way"
            if value is not None and nominal is not None and value < EXPECTED * min(nominal, stream):
                share = percent(value, nominal)
                yield link, f"{rate(value)} from rank {way}, {share} of the nominal {rate(nominal)}"


def should_give(link: Link, by_rank: dict[int, RankInfo]) -> float | None:
    """Bytes a second that the slower of the two interfaces says it can do; None when one does not say."""
    speeds = [by_rank[link.a].speed, by_rank[link.b].speed]
    return min(speeds) * 125_000.0 if all(speeds) else None


def broken(report: NetReport) -> Iterator[Finding]:
    """Lines that stand, and do not carry what is sent over them."""
    by_rank = {member.rank: member for member in report.members}
    found = {(link.a, link.b): [link.error + _packets(by_rank, link)] for link in report.links if link.error}

    def fix(hosts: Sequence[str], pair: Pair) -> str:
        a, b = (by_rank[rank] for rank in pair)
        if SILENT not in found[pair][0]:
            return f"see whether rank {a.rank} or rank {b.rank} has ended: its own output says why"
        largest = min(filter(None, (a.mtu, b.mtu)), default=1500)
        return (
            "mostly the largest packets (MTU) do not fit a switch or tunnel on the way: on "
            f"{a.host} try `ping -M do -s {largest - 28} {b.address}`; if only smaller ones pass, on every node: "
            f"ip link set {a.interface} mtu {1500 if largest > 1500 else 1400}. Else look at cable and firewall"
        )

    yield from _by_machines(
        by_rank,
        found,
        check="broken line",
        status="error",
        why="ranks connect and start over such a link, and hang when something large is sent, or fail when it breaks",
        fix=fix,
    )


def _packets(by_rank: Mapping[int, RankInfo], link: Link) -> str:
    mtus = [by_rank[rank].mtu for rank in (link.a, link.b)]
    return f" (MTU {mtus[0]} and {mtus[1]})" if all(mtus) and mtus[0] != mtus[1] else ""


def _slow(report: NetReport) -> Iterator[Finding]:
    found = marks(report)

    def fix(hosts: Sequence[str], pair: Pair) -> str:
        if len(hosts) > 2:
            return f"look at the interface, cable and switch port of {hosts[0]}, and at what else it sends"
        if len(set(hosts)) == 1:
            return f"see what else runs on {hosts[0]}"
        return f"look at cable, switch port, duplex and other traffic between {hosts[0]} and {hosts[1]}"

    yield from _by_machines(
        {member.rank: member for member in report.members},
        found,
        check="slow line",
        status="warning",
        why="the slowest line sets the pace of every collective",
        fix=fix,
    )
    if report.links and not found and not any(link.error for link in report.links):
        yield Finding(check="lines", status="ok", what=_spans(report))


def _by_machines(
    by_rank: Mapping[int, RankInfo],
    found: Mapping[Pair, list[str]],
    *,
    check: str,
    status: Status,
    why: str,
    fix: Callable[[Sequence[str], Pair], str],
) -> Iterator[Finding]:
    """One finding for each two nodes, or for one that has the same with many; the first pair is named in full."""
    grouped: dict[frozenset[str], list[Pair]] = defaultdict(list)
    for pair in sorted(found):
        grouped[frozenset(by_rank[rank].host for rank in pair)].append(pair)
    result: list[tuple[list[str], list[Pair], str]] = []
    for host, others in cut_off(set(grouped)):
        pairs = [pair for other in others for pair in grouped.pop(frozenset((host, other)))]
        start = f"{len(pairs)} between {host} and {len(others)} other nodes ({named(others)}); one of them: "
        result.append(([host, *others], pairs, start))
    for hosts, pairs in grouped.items():
        one, *rest = sorted(hosts)
        result.append(([one, *(rest or [one])], pairs, ""))
    for machines, pairs, start in result:
        a, b = (by_rank[rank] for rank in pairs[0])
        more = 0 if start else 2
        rest_of = "".join(f"; ranks {pair[0]} and {pair[1]}: {found[pair][0]}" for pair in pairs[1 : 1 + more])
        rest_of += f"; {len(pairs) - 3} more between the same nodes" if more and len(pairs) > 3 else ""
        yield Finding(
            check=check,
            status=status,
            what=f"{start}{a.name} and {b.name}: {'; '.join(found[pairs[0]])}{rest_of}",
            why=why,
            fix=fix(machines, pairs[0]),
            data={"pairs": [list(pair) for pair in pairs], "hosts": machines, "marks": [found[pair] for pair in pairs]},
        )


def _spans(report: NetReport) -> str:
    lates = [link.latency for link in report.links if link.latency is not None]
    rates = [value for link in report.links for value in (link.forth, link.back) if value is not None]
    words = [f"latency {micro(min(lates))} to {micro(max(lates))}"] if lates else []
    if rates:
        words.append(f"{rate(min(rates))} to {rate(max(rates))}")
    return f"none stands out: {', '.join(words)}"
