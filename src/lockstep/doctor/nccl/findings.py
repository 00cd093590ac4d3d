"""The story of a job's NCCL logs as findings: each with what was seen, why it matters, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lockstep.doctor.finding import Finding, Status
from lockstep.doctor.nccl import watchdog_state
from lockstep.doctor.nccl.log_summary import Communicator, LogSummary, Problem
from lockstep.rundir.format_ranks import name_ranks, number_ranks

_NOT_SHARED = ("lo", "docker", "veth", "virbr", "cni", "br-")
"""Interfaces that begin so lead nowhere outside their machine."""
_CRUTCHES = {
    "NCCL_P2P_DISABLE": "GPUs of one node do not talk directly",
    "NCCL_SHM_DISABLE": "processes of one node talk over the network",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used",
    "NCCL_NVLS_ENABLE": "NVLink SHARP is forced on or off",
    "NCCL_ALGO": "the algorithm is fixed for all sizes",
    "NCCL_PROTO": "the protocol is fixed for all sizes",
    "NCCL_NET_GDR_LEVEL": "where GPU Direct RDMA is used is fixed",
    "NCCL_P2P_LEVEL": "where GPUs talk directly is fixed",
}
"""Variables that NVIDIA's guide keeps for debugging, and what each costs."""
_GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_UNKNOWN = "not known to this doctor: shown as it was written, not guessed"
_FEW = 6


def findings(summary: LogSummary) -> list[Finding]:
    """Everything that the logs say."""
    return [
        *_versions(summary),
        *_ranks(summary),
        *_interface(summary),
        *_transports(summary),
        *_shape(summary),
        *_settings(summary),
        *watchdog_state.findings(summary.waiting, summary.seen),
        *_problems(summary),
    ]


def _versions(summary: LogSummary) -> Iterator[Finding]:
    if not summary.versions:
        return
    data = {version: _plain(who) for version, who in sorted(summary.versions.items())}
    drivers = f"; the driver supports CUDA {', '.join(sorted(summary.drivers))}" if summary.drivers else ""
    if len(summary.versions) == 1:
        yield Finding(check="nccl version", status="ok", what=next(iter(data)) + drivers, data={"versions": data})
        return
    shares = "; ".join(f"{version} on {_members(who)}" for version, who in sorted(summary.versions.items()))
    yield Finding(
        check="nccl version",
        status="error",
        what=f"the ranks have different versions: {shares}",
        why="ranks of different versions do not understand each other: they hang, or fail with truncated messages",
        fix="Install the same torch on every node, and take other libnccl.so off LD_LIBRARY_PATH.",
        data={"versions": data},
    )


def _ranks(summary: LogSummary) -> Iterator[Finding]:
    world = summary.world
    if world is None or not world.ranks:
        return
    machines = len(set(world.hosts.values()))
    data: dict[str, Any] = {
        "ranks": world.ranks,
        "machines": _by_machine(world),
        "began": sorted(world.began),
        "complete": sorted(world.complete),
        "groups": [group.ranks for group in summary.communicators],
    }
    more = len(summary.communicators) - 1
    others = f"; {more} smaller group{'s' if more > 1 else ''} besides" if more else ""
    stuck = world.began - world.complete
    unseen = set(range(world.ranks)) - world.began
    if not world.began:
        return
    if stuck:
        yield Finding(
            check="nccl start",
            status="error" if world.complete or summary.failed else "warning",
            what=f"{name_ranks(stuck, _FEW)} of {world.ranks} began to join the group and did not finish{others}",
            why="the group exists only when all of its ranks have joined: the others wait for them",
            fix="Look at the problems below, and at the logs of these ranks and of the ones that are missing.",
            data=data,
        )
        return
    on = f" on {machines} node{'s' if machines > 1 else ''}" if machines else ""
    if unseen:
        yield Finding(
            check="nccl start",
            status="warning",
            what=f"{len(world.complete)} of {world.ranks} ranks have joined{on}{others}; "
            f"nothing was read of {name_ranks(unseen, _FEW)}",
            why="a rank that failed before it could join shows only in its own log",
            fix="Name the logs of these ranks too.",
            data=data,
        )
        return
    yield Finding(check="nccl start", status="ok", what=f"all {world.ranks} ranks have joined{on}{others}", data=data)


def _interface(summary: LogSummary) -> Iterator[Finding]:
    if not summary.interfaces and not summary.networks:
        return
    names: dict[str, set[str]] = {}
    for host, found in summary.interfaces.items():
        for interface in found:
            names.setdefault(interface.split(" ")[0], set()).add(host)
    chosen = ", ".join(f"{name} ({len(hosts)} node{'s' if len(hosts) > 1 else ''})" for name, hosts in names.items())
    network = " and ".join(sorted(summary.networks))
    ports = {card for cards in summary.cards.values() for card in cards}
    what = "; ".join(
        part
        for part in (
            f"meets over {chosen}" if chosen else "",
            f"data between nodes over {network}" if network else "",
            f"ports {_some(ports)}" if ports else "",
        )
        if part
    )
    data = {
        "interfaces": {host: sorted(found) for host, found in sorted(summary.interfaces.items())},
        "network": sorted(summary.networks),
        "ports": {host: sorted(found) for host, found in sorted(summary.cards.items())},
    }
    wrong = [name for name in names if name.startswith(_NOT_SHARED)]
    if wrong and len(summary.interfaces) > 1:
        yield Finding(
            check="nccl interface",
            status="warning",
            what=f"{what}; {_some(wrong)} leads nowhere outside its machine",
            why="other nodes cannot reach an address there: joining the group hangs or fails",
            fix="NCCL_SOCKET_IFNAME=eth0, with the interface that all nodes share (`ip -brief address`)",
            data=data,
        )
        return
    yield Finding(check="nccl interface", status="ok", what=what or "not named", data=data)


def _transports(summary: LogSummary) -> Iterator[Finding]:
    world = summary.world
    if world is None or not world.pairs:
        return
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for pair, kind in sorted(world.pairs.items()):
        by_kind.setdefault(kind, []).append(pair)
    what = "; ".join(f"{kind} {_pairs(pairs)}" for kind, pairs in sorted(by_kind.items()))
    data = {
        "pairs": [{"from": a, "to": b, "transport": kind} for (a, b), kind in sorted(world.pairs.items())],
        "lines": dict(sorted(world.details.items())),
    }
    detour = [
        (a, b)
        for (a, b), kind in sorted(world.pairs.items())
        if kind.startswith("NET/") and a != b and a in world.hosts and world.hosts[a] == world.hosts.get(b)
    ]
    if detour:
        yield Finding(
            check="nccl transports",
            status="warning",
            what=f"{what}. {_pairs(detour)} of one node talk over the network",
            why="within a node NVLink, PCI (P2P) or shared memory are many times faster",
            fix="Look for NCCL_P2P_DISABLE and NCCL_SHM_DISABLE, and for containers of one node that do not share "
            "/dev/shm (--ipc=host).",
            data=data,
        )
        return
    yield Finding(check="nccl transports", status="ok", what=what, data=data)


def _shape(summary: LogSummary) -> Iterator[Finding]:
    world = summary.world
    if world is None or not (world.rings or world.trees or world.channels):
        return
    parts = []
    if world.rings:
        first = world.rings[min(world.rings)]
        order = " → ".join(map(str, first[:16])) + (" → …" if len(first) > 16 else "")
        parts.append(f"{len(world.rings)} ring{'s' if len(world.rings) > 1 else ''}, the first {order}")
    if world.trees:
        roots = [rank for rank, parent in world.parents.items() if parent < 0]
        parts.append(
            f"{world.trees} tree{'s' if world.trees > 1 else ''}"
            + (f", rank {roots[0]} at the root of the first" if len(roots) == 1 else "")
        )
    if world.channels:
        parts.append(f"{world.channels[0]} channels for collectives, {world.channels[1]} for sends")
    yield Finding(
        check="nccl rings and trees",
        status="ok",
        what="; ".join(parts),
        data={
            "rings": {str(channel): list(order) for channel, order in sorted(world.rings.items())},
            "trees": world.trees,
            "parents": {str(rank): parent for rank, parent in sorted(world.parents.items())},
            "channels": {"collectives": world.channels[0], "sends": world.channels[1]} if world.channels else None,
        },
    )


def _settings(summary: LogSummary) -> Iterator[Finding]:
    if not summary.settings:
        return
    data = {
        name: {value: _plain(who) for value, who in sorted(values.items())}
        for name, values in sorted(summary.settings.items())
    }
    uneven = sorted(
        name for name, values in summary.settings.items() if len(values) > 1 and not name.endswith("IFNAME")
    )
    crutches = [name for name in sorted(summary.settings) if name in _CRUTCHES and set(summary.settings[name]) != {"0"}]
    shown = ", ".join(f"{name}={'|'.join(sorted(values))}" for name, values in sorted(summary.settings.items()))
    if uneven:
        yield Finding(
            check="nccl settings",
            status="warning",
            what=f"{_some(uneven)} differ{'s' if len(uneven) == 1 else ''} between ranks ({shown})",
            why="most of NCCL's settings have to be the same on all ranks; if they are not, ranks wait for each other",
            fix="Set them in one place for all: `lockstep launch` hands its environment to every rank.",
            data=data,
        )
    elif crutches:
        yield Finding(
            check="nccl settings",
            status="warning",
            what=f"{shown}: " + "; ".join(f"{name} means that {_CRUTCHES[name]}" for name in crutches),
            why=f"these are meant for debugging and cost speed, or hide the real trouble ({_GUIDE})",
            fix=f"Try without: unset {' '.join(crutches)}",
            data=data,
        )
    else:
        yield Finding(check="nccl settings", status="ok", what=shown, data=data)


# ---------------------------------------------------------------- what went wrong


def _problems(summary: LogSummary) -> Iterator[Finding]:
    """One finding for each kind of trouble, the likeliest cause first."""
    kinds: dict[Any, list[Problem]] = {}
    for problem in summary.problems:
        key = problem.entry.id if problem.entry is not None else (problem.log, problem.line)
        kinds.setdefault(key, []).append(problem)
    errors = 0
    for found in kinds.values():
        entry = found[0].entry
        status = _status(found[0], summary)
        first = errors == 0 and status == "error"
        errors += status == "error"
        check = "nccl first error" if first else f"nccl {status}" if status in ("error", "warning") else "nccl note"
        yield Finding(
            check=check,
            status=status,
            what=f"{_where(found)}: {found[0].evidence}",
            why=entry.meaning if entry is not None else _UNKNOWN,
            fix=" ".join(entry.remedies) if entry is not None else "",
            data={
                "id": entry.id if entry is not None else None,
                "role": entry.role if entry is not None else None,
                "remedies": list(entry.remedies) if entry is not None else [],
                "source": entry.source if entry is not None else None,
                "evidence": found[0].evidence,
                "log": found[0].log,
                "line": found[0].line,
                "ranks": sorted({problem.rank for problem in found if problem.rank is not None}),
                "count": sum(problem.count for problem in found),
            },
        )
    if not kinds and summary.failed:
        yield Finding(
            check="nccl first error",
            status="error",
            what="a call of NCCL's failed (a line that ends in `-> N`), and no warning says why",
            why="some failures of connections leave no other trace",
            fix="Start again with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=ALL, and give this command the new logs.",
            data={"id": None, "source": "https://github.com/NVIDIA/nccl/issues/1099"},
        )
    if summary.dropped:
        yield Finding(
            check="nccl note",
            status="warning",
            what=f"{summary.dropped} more facts and problems were read than are kept",
            why="what is shown is the part that came first in the logs",
            fix="Name fewer logs at a time.",
        )


def _status(problem: Problem, summary: LogSummary) -> Status:
    if problem.entry is None:
        # NCCL warns of trifles too: what nothing is known about is an error only where something did fail.
        return "error" if summary.failed else "warning"
    return {"error": "error", "warning": "warning"}.get(problem.entry.level, "ok")  # type: ignore[return-value]


def _where(found: list[Problem]) -> str:
    ranks = {problem.rank for problem in found if problem.rank is not None}
    first = found[0]
    text = name_ranks(ranks, _FEW) if ranks else "a rank that is not named"
    if len(ranks) > 1 and first.rank is not None:
        text += f" (rank {first.rank} here)"
    machine = f" on {first.host}" if first.host else ""
    count = sum(problem.count for problem in found)
    times = f", {count} times" if count > len(found) else ""
    return f"{text}{machine}, {first.log}:{first.line}{times}"


# ---------------------------------------------------------------- words


def _by_machine(group: Communicator) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, host in sorted(group.hosts.items()):
        found.setdefault(host, []).append(rank)
    return found


def _members(who: Iterable[int | str]) -> str:
    ranks = [one for one in who if isinstance(one, int)]
    named = sorted(one for one in who if isinstance(one, str))
    return " and ".join(part for part in (name_ranks(ranks, _FEW) if ranks else "", _some(named)) if part)


def _plain(who: Iterable[int | str]) -> list[int | str]:
    return sorted(who, key=lambda one: (isinstance(one, str), one))


def _some(names: Iterable[str]) -> str:
    chosen = sorted(names)
    return ", ".join(chosen[:_FEW]) + (f" and {len(chosen) - _FEW} more" if len(chosen) > _FEW else "")


def _pairs(pairs: list[tuple[int, int]]) -> str:
    """ "0-1, 2-3": both directions are one."""
    both = sorted({(min(pair), max(pair)) for pair in pairs})
    text = ", ".join(f"{a}-{b}" for a, b in both[: _FEW * 2])
    return text + (f", … ({len(both)} in all)" if len(both) > _FEW * 2 else "")


def plain(summary: LogSummary) -> dict[str, Any]:
    """The story for programs, without what the findings have already."""
    groups: list[Communicator] = summary.communicators
    return {
        "lines": summary.lines,
        "processes": summary.processes,
        "ranks": summary.world.ranks if summary.world is not None else None,
        "groups": [{"ranks": group.ranks, "joined": number_ranks(group.complete)} for group in groups],
        "failed": summary.failed,
    }
