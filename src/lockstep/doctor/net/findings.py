"""From what was measured to what it means: pure functions from a `NetReport` to findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lockstep.doctor.finding import Finding
from lockstep.doctor.net import cpu_affinity, quality
from lockstep.doctor.net.machines import cut_off, named
from lockstep.doctor.net.results import Contact, NetReport, RankInfo
from lockstep.doctor.net.schedule import Pair
from lockstep.rundir.format_ranks import name_ranks

FEW = 6
"""Names that are listed."""
SKEW = 1.0
"""Seconds by which clocks may differ before logs of several nodes cannot be read side by side."""


def findings(report: NetReport) -> list[Finding]:
    """All that is to be said, in the order in which it matters."""
    if not report.members:
        return [Finding(check="ranks", status="error", what="no rank came")]
    return [
        _presence(report),
        *_settings(report),
        *connections(report),
        *quality.findings(report),
        *_clocks(report),
        *versions(report.members),
        *cpu_affinity.findings(report.members),
        *_devices(report.members),
        *_collectives(report),
    ]


def _presence(report: NetReport) -> Finding:
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
    where = f"{hosts} node{'s' if hosts > 1 else ''}"
    return Finding(check="ranks", status="ok", what=f"all {count} are there, on {where}", data={"missing": []})


def _settings(report: NetReport) -> Iterator[Finding]:
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


def broken_pairs(report: NetReport) -> set[Pair]:
    """Pairs of which at least one cannot connect to the other, or that cannot send: gloo and NCCL need both ways."""
    return {_pair(contact) for contact in report.contacts} | {(link.a, link.b) for link in report.links if link.error}


def connections(report: NetReport) -> Iterator[Finding]:
    """Nodes whose ranks cannot connect; one that many others cannot talk to is told once. Or that all is well."""
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


def _lonely(
    by_rank: dict[int, RankInfo], host: str, others: Sequence[str], failed: Mapping[tuple[str, str], list[Contact]]
) -> Finding:
    """One finding for a node that many others cannot talk to; the pair that stands for all is named in full."""
    from_it = [contact for other in others for contact in failed.get((host, other), [])]
    to_it = [contact for other in others for contact in failed.get((other, host), [])]
    first = _unreachable(by_rank, (to_it or from_it)[:1], [])
    into = sum((other, host) in failed for other in others)
    out = sum((host, other) in failed for other in others)
    pairs = sorted({_pair(contact) for contact in (*from_it, *to_it)})
    return replace(
        first,
        what=f"{host} and {len(others)} other nodes cannot talk ({into} cannot connect to it, it cannot connect to "
        f"{out}): {named(others)}. One of {len(pairs)} pairs: {first.what}",
        data={
            **first.data,
            "pairs": [list(pair) for pair in pairs],
            "hosts": [host, *others],
            "errors": sorted({contact.error for contact in (*from_it, *to_it)}),
        },
    )


def _unreachable(by_rank: dict[int, RankInfo], there: Sequence[Contact], back: Sequence[Contact]) -> Finding:
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


def _remedy(contact: Contact, target: RankInfo, instead: str) -> str:
    if instead:
        return f"on {target.host}: {_export(instead)}  ({instead} can be reached)"
    if "means the machine itself" in contact.error:
        return f"on {target.host}: {_export(next(iter(target.others), None))}, or correct its line in /etc/hosts"
    if "route" in contact.error or "unreachable" in contact.error or "not permitted" in contact.error:
        return f"there is no way to {target.address}: see `ip route get {target.address}`, the cable and the network"
    if "refused" in contact.error or "somebody else" in contact.error:
        return f"see that {target.address} is an address of {target.host} alone, and that no firewall refuses"
    return (
        f"open all TCP ports between the nodes (ranks listen on ports that the system picks: "
        f"cat /proc/sys/net/ipv4/ip_local_port_range); test one with: nc -vz {target.address} PORT"
    )


def _export(interface: str | None) -> str:
    name = interface or "INTERFACE"
    return f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"


# --- what must be the same -------------------------------------------------------------------------------------------


def _clocks(report: NetReport) -> Iterator[Finding]:
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
        why="logs of the nodes cannot be read side by side, and time stamps of files mislead",
        fix="switch time synchronisation on, on both: timedatectl set-ntp true",
        data={**data, "ahead": by_rank[ahead].host, "behind": by_rank[behind].host},
    )


_WHY = {
    "torch": "ranks with different versions of torch can hang or compute differently",
    "python": "what one Python pickles another may not read",
    "lockstep": "ranks with different versions of lockstep may not understand each other",
    "lockstep source": "the version is the same and the code is not: one node has been changed by hand",
    "script": "ranks that run different scripts call different collectives, and hang",
}


def versions(members: Sequence[RankInfo]) -> Iterator[Finding]:
    """One finding for each thing that is not the same on all nodes; one for all that is."""
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
            why=_WHY.get(name, "it must be the same on every node"),
            fix="install the same on every node" if name != "script" else "copy the same script to every node",
            data=dict(having),
        )
    if same and len(firsts) > 1:
        yield Finding(check="versions", status="ok", what=f"the same on {len(firsts)} nodes: {', '.join(same)}")


def _devices(members: Sequence[RankInfo]) -> Iterator[Finding]:
    """GPUs of the job that are not alike, over all nodes."""
    having: dict[tuple[str, int], list[RankInfo]] = defaultdict(list)
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


def _collectives(report: NetReport) -> Iterator[Finding]:
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


def _first_per_host(members: Sequence[RankInfo]) -> Iterator[RankInfo]:
    seen: set[str] = set()
    for member in members:
        if member.host not in seen:
            seen.add(member.host)
            yield member


def _pair(contact: Contact) -> Pair:
    return min(contact.source, contact.target), max(contact.source, contact.target)
