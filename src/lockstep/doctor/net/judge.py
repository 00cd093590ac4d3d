"""From what was measured to what it means: pure functions from a `Report` to findings."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from lockstep.doctor.finding import Finding
from lockstep.doctor.net import cores
from lockstep.doctor.net.machines import named
from lockstep.doctor.net.results import Contact, Link, Member, Report
from lockstep.doctor.net.schedule import Pair
from lockstep.rundir.ranks import name_ranks

SLOWER = 3.0
"""A latency of this many times the middle one is marked."""
LESS = 0.5
"""So is a rate below this part of the middle one."""
ENOUGH = 3
"""Lines of one kind from which on there is a middle that means something."""
NOISE = {True: 200e-6, False: 50e-6}
"""Seconds by which latencies may differ, inside a machine and between two, when it has other things to do."""
FAR = 1e-3
"""Seconds of latency between machines from which on every collective of small tensors is slow."""
STREAM = 10_000
"""Mbit/s that one stream of one process can be expected to give, however fast the hardware."""
EXPECTED = 0.3
"""The part of what the hardware should give below which a line is marked."""
MANY = 4
"""Machines that one cannot talk to from which on it is the one to look at."""
FEW = 6
"""Names that are listed."""
SKEW = 1.0
"""Seconds by which clocks may differ before logs of several machines cannot be read side by side."""


def findings(report: Report) -> list[Finding]:
    """All that is to be said, in the order in which it matters."""
    if not report.members:
        return [Finding(check="ranks", status="error", what="no rank came")]
    return [
        _presence(report),
        *_settings(report),
        *connections(report),
        *_lines(report),
        *_clocks(report),
        *versions(report.members),
        *cores.findings(report.members),
        *_devices(report.members),
        *_collectives(report),
    ]


def _presence(report: Report) -> Finding:
    count = len(report.members) + len(report.missing)
    hosts = len({member.host for member in report.members})
    if report.missing:
        return Finding(
            check="ranks",
            status="error",
            what=f"{name_ranks(report.missing, FEW)} of {count} did not come, or went away",
            why="a collective waits for every rank",
            fix="look at the output of those ranks: they failed to start, or cannot reach the main address and port",
            data={"missing": list(report.missing)},
        )
    where = f"{hosts} machine{'s' if hosts > 1 else ''}"
    return Finding(check="ranks", status="ok", what=f"all {count} are there, on {where}", data={"missing": []})


def _settings(report: Report) -> Iterator[Finding]:
    for member in _first_per_host(report.members):
        if member.problem:
            yield Finding(
                check="interface",
                status="error",
                what=f"{member.host}: {member.problem}",
                why="ranks on this machine cannot be reached by the others",
                fix=_export(next(iter(member.others), None)),
                data={"host": member.host},
            )


# --- who can talk to whom --------------------------------------------------------------------------------------------


def broken_pairs(contacts: Iterable[Contact]) -> set[Pair]:
    """Pairs of which at least one cannot connect to the other: gloo and NCCL need both."""
    return {_pair(contact) for contact in contacts}


def connections(report: Report) -> Iterator[Finding]:
    """Machines whose ranks cannot connect; one that many others cannot talk to is told once. Or that all is well."""
    by_rank = {member.rank: member for member in report.members}
    failed: dict[tuple[str, str], list[Contact]] = defaultdict(list)
    for contact in report.contacts:
        if contact.source in by_rank and contact.target in by_rank:
            failed[by_rank[contact.source].host, by_rank[contact.target].host].append(contact)
    apart = {frozenset(hosts) for hosts in failed}
    for host, others in cut_off(apart):
        apart -= {frozenset((host, other)) for other in others}
        yield _lonely(by_rank, host, others, failed)
    for one, *rest in sorted(map(sorted, apart)):
        other = rest[0] if rest else one
        there, back = failed.get((one, other), []), failed.get((other, one), []) if rest else []
        yield _unreachable(by_rank, there or back, back if there else [])
    if len(report.members) > 1 and not failed and set(by_rank) == set(report.tried):
        pairs = len(report.members) * (len(report.members) - 1) // 2
        what = f"every rank can connect to every other ({pairs} pair{'s' if pairs > 1 else ''}, each way)"
        yield Finding(check="connections", status="ok", what=what)


def cut_off(apart: Set[frozenset[str]]) -> Iterator[tuple[str, list[str]]]:
    """Machines that many others cannot talk to, the worst first, each with those others that were not named before."""
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


def _lonely(
    by_rank: dict[int, Member], host: str, others: Sequence[str], failed: Mapping[tuple[str, str], list[Contact]]
) -> Finding:
    """One finding for a machine that many others cannot talk to; the pair that stands for all is named in full."""
    from_it = [contact for other in others for contact in failed.get((host, other), [])]
    to_it = [contact for other in others for contact in failed.get((other, host), [])]
    first = _unreachable(by_rank, (to_it or from_it)[:1], [])
    into = sum((other, host) in failed for other in others)
    out = sum((host, other) in failed for other in others)
    pairs = sorted({_pair(contact) for contact in (*from_it, *to_it)})
    return replace(
        first,
        what=f"{host} and {len(others)} other machines cannot talk ({into} cannot connect to it, it cannot connect to "
        f"{out}): {named(others)}. One of {len(pairs)} pairs: {first.what}",
        data={
            **first.data,
            "pairs": [list(pair) for pair in pairs],
            "hosts": [host, *others],
            "errors": sorted({contact.error for contact in (*from_it, *to_it)}),
        },
    )


def _unreachable(by_rank: dict[int, Member], there: Sequence[Contact], back: Sequence[Contact]) -> Finding:
    first = there[0]
    source, target = by_rank[first.source], by_rank[first.target]
    pairs = sorted({_pair(contact) for contact in (*there, *back)})
    ways = "neither way" if back or source.host == target.host else "this way only; the other way works"
    through = f", leaving by {first.through}" if first.through and first.through != source.interface else ""
    more = f"; the same for {len(pairs) - 1} more pair{'s' if len(pairs) > 2 else ''}" if len(pairs) > 1 else ""
    if back and back[0].error != first.error:
        more += f"; the other way: {back[0].error}"
    return Finding(
        check="connections",
        status="error",
        what=f"{source.name} cannot connect to {target.name}{through}: {first.error} ({ways}){more}",
        why="gloo and NCCL connect every two ranks: a job would hang or fail at its first collective",
        fix=_remedy(first, target, next((each.instead for each in (*there, *back) if each.instead), "")),
        data={
            "pairs": [list(pair) for pair in pairs],
            "hosts": [source.host, target.host],
            "interfaces": [source.interface, target.interface],
            "addresses": [source.address, target.address],
            "errors": sorted({contact.error for contact in (*there, *back)}),
        },
    )


def _remedy(contact: Contact, target: Member, instead: str) -> str:
    if instead:
        return f"on {target.host}: {_export(instead)}  ({instead} can be reached)"
    if "means the machine itself" in contact.error:
        return f"on {target.host}: {_export(next(iter(target.others), None))}, or correct its line in /etc/hosts"
    if "route" in contact.error or "unreachable" in contact.error or "not permitted" in contact.error:
        return f"there is no way to {target.address}: see `ip route get {target.address}`, the cable and the network"
    if "refused" in contact.error or "somebody else" in contact.error:
        return f"see that {target.address} is an address of {target.host} alone, and that no firewall refuses"
    return (
        f"open all TCP ports between the machines (ranks listen on ports that the system picks: "
        f"cat /proc/sys/net/ipv4/ip_local_port_range); test one with: nc -vz {target.address} PORT"
    )


def _export(interface: str | None) -> str:
    name = interface or "INTERFACE"
    return f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"


# --- how well --------------------------------------------------------------------------------------------------------


def marks(report: Report) -> dict[tuple[int, int], list[str]]:
    """What is wrong with which line, in words."""
    by_rank = {member.rank: member for member in report.members}
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    for link in report.links:
        if link.error:
            found[link.a, link.b].append(link.error)
    for inside in (True, False):
        links = [link for link in report.links if (by_rank[link.a].host == by_rank[link.b].host) == inside]
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


def _against_the_hardware(links: Sequence[Link], by_rank: dict[int, Member]) -> Iterator[tuple[Link, str]]:
    for link in links:
        if link.latency is not None and link.latency > FAR:
            yield link, f"latency {micro(link.latency)}, far above what a local network has"
        nominal = should_give(link, by_rank)
        if nominal is None or link.forth is None or link.back is None:
            continue
        expected = min(nominal, STREAM * 125_000)
        for value, way in ((link.forth, f"{link.a} to {link.b}"), (link.back, f"{link.b} to {link.a}")):
            if value < EXPECTED * expected:
                share = percent(value, nominal)
                yield link, f"{rate(value)} from rank {way}, {share} of the nominal {rate(nominal)}"


def should_give(link: Link, by_rank: dict[int, Member]) -> float | None:
    """Bytes a second that the slower of the two interfaces says it can do; None when one does not say."""
    speeds = [by_rank[link.a].speed, by_rank[link.b].speed]
    return min(speeds) * 125_000.0 if all(speeds) else None


def _lines(report: Report) -> Iterator[Finding]:
    found = marks(report)
    by_rank = {member.rank: member for member in report.members}
    grouped: dict[frozenset[str], list[Pair]] = defaultdict(list)
    for pair in sorted(found):
        grouped[frozenset(by_rank[rank].host for rank in pair)].append(pair)
    for host, others in cut_off(set(grouped)):
        pairs = [pair for other in others for pair in grouped.pop(frozenset((host, other)))]
        start = f"{len(pairs)} between {host} and {len(others)} other machines ({named(others)}); one of them: "
        fix = f"look at the interface, cable and switch port of {host}, and at what else it sends"
        yield _slow(by_rank, found, pairs, [host, *others], start, fix, more=0)
    for hosts, pairs in grouped.items():
        one, *rest = sorted(hosts)
        fix = f"see what else runs on {one}"
        if rest:
            fix = f"look at cable, switch port, duplex and other traffic between {one} and {rest[0]}"
        yield _slow(by_rank, found, pairs, [one, *(rest or [one])], "", fix)
    if report.links and not found:
        yield Finding(check="lines", status="ok", what=_spans(report))


def _slow(
    by_rank: Mapping[int, Member],
    found: Mapping[Pair, list[str]],
    pairs: Sequence[Pair],
    hosts: list[str],
    start: str,
    fix: str,
    more: int = 2,
) -> Finding:
    """One finding about some lines; the first is named in full."""
    a, b = (by_rank[rank] for rank in pairs[0])
    rest = "".join(f"; ranks {pair[0]} and {pair[1]}: {found[pair][0]}" for pair in pairs[1 : 1 + more])
    rest += f"; {len(pairs) - 1 - more} more between the same machines" if more and len(pairs) > 1 + more else ""
    return Finding(
        check="slow line",
        status="warning",
        what=f"{start}{a.name} and {b.name}: {'; '.join(found[pairs[0]])}{rest}",
        why="the slowest line sets the pace of every collective",
        fix=fix,
        data={"pairs": [list(pair) for pair in pairs], "hosts": hosts, "marks": [found[pair] for pair in pairs]},
    )


def _spans(report: Report) -> str:
    lates = [link.latency for link in report.links if link.latency is not None]
    rates = [value for link in report.links for value in (link.forth, link.back) if value is not None]
    words = [f"latency {micro(min(lates))} to {micro(max(lates))}"] if lates else []
    if rates:
        words.append(f"{rate(min(rates))} to {rate(max(rates))}")
    return f"none stands out: {', '.join(words)}"


# --- what must be the same -------------------------------------------------------------------------------------------


def _clocks(report: Report) -> Iterator[Finding]:
    by_rank = {member.rank: member for member in report.members}
    pairs = [link for link in report.links if link.offset is not None and by_rank[link.a].host != by_rank[link.b].host]
    if not pairs:
        return
    worst = max(pairs, key=lambda link: abs(link.offset or 0))
    offset = worst.offset or 0.0
    data = {"seconds": abs(offset), "uncertain": worst.uncertain}
    if abs(offset) - worst.uncertain <= SKEW:
        what = f"apart by {abs(offset) * 1000:.1f} ms at most (± {worst.uncertain * 1000:.1f} ms)"
        yield Finding(check="clocks", status="ok", what=what, data=data)
        return
    ahead, behind = (worst.b, worst.a) if offset > 0 else (worst.a, worst.b)
    yield Finding(
        check="clocks",
        status="warning",
        what=f"the clock of {by_rank[ahead].host} is {abs(offset):.1f} s ahead of that of {by_rank[behind].host}",
        why="logs of the machines cannot be read side by side, and time stamps of files mislead",
        fix="switch time synchronisation on, on both: timedatectl set-ntp true",
        data={**data, "ahead": by_rank[ahead].host, "behind": by_rank[behind].host},
    )


_WHY = {
    "torch": "ranks with different versions of torch can hang or compute differently",
    "python": "what one Python pickles another may not read",
    "lockstep": "ranks with different versions of lockstep may not understand each other",
    "lockstep source": "the version is the same and the code is not: one machine has been changed by hand",
    "script": "ranks that run different scripts call different collectives, and hang",
}


def versions(members: Sequence[Member]) -> Iterator[Finding]:
    """One finding for each thing that is not the same on all machines; one for all that is."""
    firsts = list(_first_per_host(members))
    names = list(dict.fromkeys(name for member in firsts for name in member.versions))
    same = []
    for name in names:
        having: dict[str, list[str]] = defaultdict(list)
        for member in firsts:
            having[member.versions.get(name, "missing")].append(member.host)
        if len(having) == 1:
            same.append(f"{name} {next(iter(having))}")
            continue
        yield Finding(
            check=name,
            status="error",
            what="; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in having.items()),
            why=_WHY.get(name, "it must be the same on every machine"),
            fix="install the same on every machine" if name != "script" else "copy the same script to every machine",
            data=dict(having),
        )
    if same and len(firsts) > 1:
        yield Finding(check="versions", status="ok", what=f"the same on {len(firsts)} machines: {', '.join(same)}")


def _devices(members: Sequence[Member]) -> Iterator[Finding]:
    """GPUs of the job that are not alike, over all machines."""
    having: dict[tuple[str, int], list[Member]] = defaultdict(list)
    for member in members:
        if member.device_name:
            having[member.device_name, round(member.device_memory / 2**30)].append(member)
    if len(having) < 2:
        return
    listed = "; ".join(
        f"{name}, {size} GiB: {name_ranks((each.rank for each in of), FEW)}" for (name, size), of in having.items()
    )
    _, smallest = min(having, key=lambda kind: kind[1])
    yield Finding(
        check="devices",
        status="warning",
        what=f"the ranks have devices that are not alike: {listed}",
        why=f"all go at the pace of the slowest, and the batch has to fit the smallest ({smallest} GiB)",
        fix="train on those that are alike, or give the smaller ones smaller batches",
        data={f"{name}, {size} GiB": [each.rank for each in of] for (name, size), of in having.items()},
    )


def _collectives(report: Report) -> Iterator[Finding]:
    if len(report.group) < 2:
        return
    wrong = [outcome for outcome in report.outcomes if outcome.error]
    for outcome in wrong:
        member = next((each for each in report.members if each.rank == outcome.rank), None)
        yield Finding(
            check="collectives",
            status="error",
            what=f"{member.name if member else f'rank {outcome.rank}'}: {outcome.error}",
            why="this is what training does at every step",
            fix="run again with TORCH_DISTRIBUTED_DEBUG=INFO, and on GPUs with NCCL_DEBUG=INFO",
            data={"rank": outcome.rank},
        )
    left_out = sorted({member.rank for member in report.members} - set(report.group))
    checked = [outcome.rank for outcome in report.outcomes if outcome.checked]
    if checked and not wrong:
        out = f"; without {name_ranks(left_out, FEW)}, which cannot talk to all of them" if left_out else ""
        what = f"barrier and all_reduce gave the right values on {len(checked)} ranks{out}"
        yield Finding(check="collectives", status="ok", what=what, data={"left out": left_out})


# --- words -----------------------------------------------------------------------------------------------------------


def _first_per_host(members: Sequence[Member]) -> Iterator[Member]:
    seen: set[str] = set()
    for member in members:
        if member.host not in seen:
            seen.add(member.host)
            yield member


def _pair(contact: Contact) -> Pair:
    return min(contact.source, contact.target), max(contact.source, contact.target)


def micro(seconds: float | None) -> str:
    """A latency as people read it."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def rate(value: float | None) -> str:
    """Bytes a second as people read it."""
    if value is None:
        return "-"
    if value < 1e6:
        return f"{value / 1e3:.1f} kB/s"
    return f"{value / 1e9:.2f} GB/s" if value >= 1e9 else f"{value / 1e6:.1f} MB/s"


def percent(value: float | None, of: float | None) -> str:
    """A share; a dash where one is not known."""
    if value is None or not of:
        return "-"
    share = 100 * value / of
    return f"{share:.0f}%" if share >= 1 else f"{share:.1g}%"
