"""Whether the ranks of a node get in each other's way on its cores.

A launcher may give each rank cores of its own, so one rank does not know what there is for all: they tell each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lockstep.doctor.finding import Finding
from lockstep.doctor.net.results import RankInfo
from lockstep.rundir.format_ranks import name_ranks, number_ranks

_FEW = 6


def findings(members: Sequence[RankInfo]) -> Iterator[Finding]:
    """Cores and threads of each node whose ranks have told them; nodes that are alike are told once."""
    by_host: dict[str, list[RankInfo]] = {}
    for member in members:
        if member.cores:
            by_host.setdefault(member.host, []).append(member)
    alike: dict[object, list[str]] = {}
    for host, own in by_host.items():
        alike.setdefault(tuple((tuple(each.cores), each.share, each.threads) for each in own), []).append(host)
    for hosts in alike.values():
        more = f" and {len(hosts) - 1} more that are alike" if len(hosts) > 1 else ""
        for judge in (_cores, _threads):
            finding = judge(f"{hosts[0]}{more}", by_host[hosts[0]])
            yield replace(finding, data={**finding.data, "hosts": hosts})


def _cores(host: str, members: Sequence[RankInfo]) -> Finding:
    """Whether there is a core for each."""
    there = _together(members)
    share = min((member.share for member in members if member.share is not None), default=None)
    limit = f", of which the control group allows the time of {share:g}" if share is not None and share < there else ""
    data = {"cores": {str(member.rank): list(member.cores) for member in members}, "cgroup": share}
    for cores, crowd in _crowds(members):
        room = len(cores) if share is None else min(float(len(cores)), share)
        if len(crowd) > room:
            return Finding(
                check="cores",
                status="warning",
                what=f"{host}: {name_ranks((each.rank for each in crowd), _FEW)} on {_named(cores)}{limit}",
                why="ranks that share a core take turns, and all wait for the last one",
                fix="ask for more (--cpus-per-task in SLURM, --cpus in docker), let each have its own or lift the tie "
                "(mpirun --bind-to none, srun --cpu-bind=none), or start fewer processes",
                data=data,
            )
    each = sorted({len(member.cores) for member in members})
    own = f", {number_ranks(each)} for each rank alone" if _apart(members) and len(members) > 1 else ""
    what = f"{host}: {len(members)} rank{'s' if len(members) > 1 else ''} on {there} core{'s' if there > 1 else ''}"
    return Finding(check="cores", status="ok", what=f"{what}{own}{limit}", data=data)


def _threads(host: str, members: Sequence[RankInfo]) -> Finding:
    """Whether the threads of all ranks fit the cores they are tied to."""
    data = {"threads": {str(member.rank): member.threads for member in members}}
    for cores, crowd in _crowds(members):
        started = sum(_of(member) for member in crowd)
        if started > max(len(cores), len(crowd)):
            each = max(1, len(cores) // len(crowd))
            unset = (
                "" if crowd[0].threads else ": OMP_NUM_THREADS does not say how many, so torch takes one for each core"
            )
            ranks = name_ranks((member.rank for member in crowd), _FEW)
            return Finding(
                check="threads",
                status="warning",
                what=f"{host}: {started} threads of {ranks} on {_named(cores)}{unset}",
                why="more threads than cores get in each other's way; several times as slow is common",
                fix=f"export OMP_NUM_THREADS={each}",
                data=data,
            )
    counts = number_ranks(_of(member) for member in members)
    plural = "s" if counts != "1" else ""
    return Finding(check="threads", status="ok", what=f"{host}: {counts} thread{plural} for each rank", data=data)


def _of(member: RankInfo) -> int:
    return member.threads or len(member.cores)


def _crowds(members: Sequence[RankInfo]) -> Iterator[tuple[list[int], list[RankInfo]]]:
    """Each set of cores that a rank is tied to, with all ranks that have no other core; the smallest sets first."""
    for cores in sorted({tuple(member.cores) for member in members}, key=lambda cores: (len(cores), cores)):
        yield list(cores), [member for member in members if set(member.cores) <= set(cores)]
    every = sorted({core for member in members for core in member.cores})
    yield every, list(members)


def _together(members: Sequence[RankInfo]) -> int:
    return len({core for member in members for core in member.cores})


def _apart(members: Sequence[RankInfo]) -> bool:
    return sum(len(member.cores) for member in members) == _together(members)


def _named(cores: Sequence[int]) -> str:
    return f"core{'s' if len(cores) > 1 else ''} {number_ranks(cores, _FEW)}"
