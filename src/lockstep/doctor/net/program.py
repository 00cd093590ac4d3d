"""``lockstep doctor net``, as every rank runs it: meet, connect, measure pair by pair, then what training uses.

What is dangerous comes last. A pair that cannot talk is named as soon as all connections have been tried; the
collectives then run on ranks that can all talk to each other.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from lockstep.config import env, resolve
from lockstep.doctor.finding import Finding
from lockstep.doctor.net import collective, facts, links, machines, quality, schedule
from lockstep.doctor.net import findings as network_findings
from lockstep.doctor.net.collective import Collective, Stuck
from lockstep.doctor.net.results import Contact, Link, NetReport, Point, RankInfo, RankResult
from lockstep.doctor.net.schedule import Pair
from lockstep.doctor.net.store_channel import StoreChannel, read_all
from lockstep.doctor.net.tcp_probe import Listener
from lockstep.errors import LockstepError, TopologyError
from lockstep.topology.topology import Topology, discover

Log = Callable[[str], None]
MOST_PAIRS = 2016
"""Pairs that are all measured: those of 64 ranks. Of more ranks, one on each node stands for the others."""

_SLACK = 20.0
"""Seconds for what has been told already, or is told once rank 0 has stopped waiting."""


@dataclass(frozen=True, kw_only=True)
class NetOptions:
    """What is to be measured."""

    patience: float = 120.0
    """Seconds in which all ranks have to be there: on a cluster some start later than others."""
    budget: float = 90.0
    """Seconds that measuring may take; where it does not reach, less is measured, and that is said."""
    quick: bool = False
    """Shorter, and without the large sizes."""
    rates: bool = True
    """Whether to measure rates and collectives, or only who can talk to whom, and the clocks."""
    send_recv: bool = False
    """Whether to measure send and receive of the process group between all pairs on the CPU too."""
    script: Path | None = None
    """A script that must be the same on every node."""

    @property
    def pings(self) -> int:
        """Round trips for each pair."""
        return 20 if self.quick or not self.rates else 100

    @property
    def target(self) -> float:
        """Seconds for each direction of each pair."""
        return 0.0 if not self.rates else 0.05 if self.quick else 0.25


def examine(
    options: NetOptions,
    *,
    log: Log | None = None,
    alarm: Callable[[list[Finding]], None] | None = None,
    own_findings: Sequence[Finding] = (),
) -> tuple[NetReport | None, int]:
    """Called on: all ranks. Rank 0 gets the report; the others get None. The number is this process's rank."""
    environ = env.snapshot()
    topology = _topology(environ)
    log_on_rank_0: Log = log if log is not None and topology.rank == 0 else _silent
    # On several nodes it is tried which of their interfaces lead to each other.
    listener = Listener(facts.choose(topology, environ).address if topology.num_nodes == 1 else None)
    try:
        own = facts.introduce(topology, environ, listener, script=options.script)
        channel = StoreChannel.join(topology, own, options.patience, log or _silent, alarm or _unheard)
        run = _NetRun(channel, topology, options, log_on_rank_0, alarm)
        return run.whole(own, own_findings), topology.rank
    finally:
        listener.close()


def finish(code: int) -> None:
    """End this process without waiting for what hangs in it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _topology(environ: Mapping[str, str]) -> Topology:
    cpu = resolve.resolve("cpu", None, False, environ, env.parse_flag).value
    fixed = resolve.resolve("device", None, None, environ, resolve.as_text).value
    return discover(environ, cpu=cpu, device=fixed)


def _silent(text: str) -> None:
    """Say nothing."""


def _unheard(findings: list[Finding]) -> None:
    """Nobody wants to know at once."""


class _NetRun:
    """One examination on one rank."""

    def __init__(
        self,
        channel: StoreChannel,
        topology: Topology,
        options: NetOptions,
        log: Log,
        alarm: Callable[[list[Finding]], None] | None,
    ) -> None:
        self.channel = channel
        self.topology = topology
        self.options = options
        self.log = log
        self.alarm = alarm
        self.started = time.monotonic()

    def whole(self, own: RankInfo, own_findings: Sequence[Finding] = ()) -> NetReport | None:
        """Called on: all ranks. All of it; the report on rank 0."""
        if own.local_rank == 0:
            self.channel.send("findings", [finding.plain() for finding in own_findings])
        members = self._roll(own)
        own = members[own.rank]
        self.started = time.monotonic()
        hosts = {rank: member.host for rank, member in members.items()}
        count = len(set(hosts.values()))
        self.log(f"{len(members)} of {self.channel.world_size} ranks on {count} node{'s' if count > 1 else ''}")
        pairs = schedule.fewer(hosts, list(combinations(sorted(hosts), 2)), MOST_PAIRS)
        peers = {rank for pair in pairs if own.rank in pair for rank in pair}
        tried, contacts, lines = self._connect(own, members, peers)
        broken = {(contact.source, contact.target) for contact in contacts}
        dialled = {pair: links.dialler(pair, tried, broken) for pair in pairs}
        found = self._measure(members, {pair: rank for pair, rank in dialled.items() if rank is not None}, lines)
        broken |= self._broken_lines(found)
        outcome, group, device_links = self._collective(hosts, {(min(pair), max(pair)) for pair in broken})
        last = {"outcome": outcome.plain(), "links": [link.plain() for link in (*found, *device_links)]}
        self.channel.send("last words", last)
        if self.channel.rank == 0:
            return self._report(self._with_findings(members), tried, contacts, group)
        # Rank 0, which may host the store, leaves when it has heard this: nothing is asked of the store afterwards.
        self.channel.require_open()
        return None

    def _roll(self, own: RankInfo) -> dict[int, RankInfo]:
        """Called on: all ranks. Those who have come by the time that rank 0 stops waiting: the same on every rank."""
        self.channel.send("member", own.plain())
        if self.channel.rank == 0:
            received = self.channel.receive("member", self.options.patience, log=self.log)
            self.channel.send("roll", sorted(received))
        else:
            roll = self.channel.receive("roll", self.options.patience + _SLACK, of=[0]).get(0)
            self.channel.require_open()
            if roll is None:
                raise TopologyError(
                    f"Rank 0, which leads the examination, did not come within {self.options.patience:g} s. Look at "
                    "its output; --patience S waits longer."
                )
            if own.rank not in roll:
                raise TopologyError(
                    f"Rank {own.rank} came after the others had stopped waiting for it ({self.options.patience:g} s). "
                    "Start it earlier, or let them wait longer with --patience S."
                )
            self.channel.lose(set(range(self.channel.world_size)) - set(roll))
            received = self.channel.receive("member", _SLACK, of=roll)
        self.channel.require_open()
        return distinguish_hosts({rank: RankInfo.of(plain) for rank, plain in received.items()})

    def _with_findings(self, members: Mapping[int, RankInfo]) -> dict[int, RankInfo]:
        """Called on: rank 0. What the checks of each node have found, told by its first rank before it was met."""
        firsts = [rank for rank, member in members.items() if member.local_rank == 0]
        received = self.channel.receive("findings", links.CONNECT, of=firsts)
        return {rank: replace(member, findings=received.get(rank, ())) for rank, member in members.items()}

    def _connect(
        self, own: RankInfo, members: Mapping[int, RankInfo], keep: Container[int]
    ) -> tuple[list[int], list[Contact], dict[int, socket.socket]]:
        """Called on: all ranks. Who has tried to connect to all others, what failed, and this rank's own lines.

        Rank 0 gets all failures with their reasons, the others only who could not connect to whom.
        """
        self.log("connecting every rank to every other")
        contacts, lines = links.reach(own, members, keep)
        self.channel.send("contacts", [contact.plain() for contact in contacts])
        if self.channel.rank == 0:
            named = self._raise_alarm(members, contacts, set())  # what this rank has seen need not wait for the others
            received = self.channel.receive("contacts", 10 * links.CONNECT, log=self.log)
            contacts = read_all(Contact, received)
            ways = [[contact.source, contact.target] for contact in contacts]
            self.channel.send("connections", {"tried": sorted(received), "failed": ways})
            self._raise_alarm(members, contacts, named)
            return sorted(received), contacts, lines
        received = self.channel.receive("connections", 12 * links.CONNECT, of=[0]).get(0, {"tried": [], "failed": []})
        self.channel.lose(set(members) - set(received["tried"]))
        return received["tried"], [Contact(source=a, target=b, error="failed") for a, b in received["failed"]], lines

    def _raise_alarm(
        self, members: Mapping[int, RankInfo], contacts: Sequence[Contact], named: set[frozenset[str]]
    ) -> set[frozenset[str]]:
        """Say at once who cannot talk, but for the nodes that are named already; those that are now."""
        if self.alarm is None:
            return named
        seen = [members[rank] for rank in sorted(members)]
        so_far = NetReport(members=seen, contacts=contacts)
        bad = [finding for finding in network_findings.connections(so_far) if finding.status == "error"]
        new = [finding for finding in bad if frozenset(finding.data["hosts"]) not in named]
        if new:
            self.alarm(new)
        return named | {frozenset(finding.data["hosts"]) for finding in new}

    def _measure(
        self, members: Mapping[int, RankInfo], dialled: Mapping[Pair, int], lines: dict[int, socket.socket]
    ) -> list[Link]:
        """The pairs that can talk, round by round, each by the rank with the line; one that breaks is told at once."""
        order = schedule.rounds({rank: member.host for rank, member in members.items()}, dialled)
        # Half of the budget for the pairs, two directions each, and growing into the target takes as long again.
        target = min(self.options.target, self.options.budget / 2 / max(1, len(order)) / 4)
        found = []
        for number, together in enumerate(order):
            self.channel.barrier(f"round/{number}", 4 * links.SILENCE)
            for pair in together:
                if dialled[pair] != self.channel.rank:
                    continue
                peer = pair[0] if pair[1] == self.channel.rank else pair[1]
                link = links.measure(
                    lines.pop(peer), own=self.channel.rank, peer=peer, pings=self.options.pings, target=target
                )
                found.append(link)
                if link.error and self.alarm is not None:
                    both = NetReport(members=[members[rank] for rank in pair], links=[link])
                    self.alarm(list(quality.broken(both)))
            self.log(f"pairs: round {number + 1} of {len(order)}")
        for line in lines.values():
            line.close()
        return found

    def _broken_lines(self, found: Sequence[Link]) -> set[Pair]:
        """Called on: all ranks. Lines that broke while they were measured: on rank 0 all, on the others their own."""
        own = [(link.a, link.b) for link in found if link.error]
        self.channel.send("broken lines", own)
        if self.channel.rank != 0:
            return set(own)
        received = self.channel.receive("broken lines", 4 * links.SILENCE, log=self.log)
        return {(a, b) for pairs in received.values() for a, b in pairs}

    def _collective(self, hosts: Mapping[int, str], broken: Set[Pair]) -> tuple[RankResult, list[int], list[Link]]:
        self.channel.barrier("before collectives", 4 * links.SILENCE)
        copy = None
        if self.topology.local_rank == 0 and self.options.rates:
            copy = collective.copy_rate()
        self.channel.barrier("copied", 4 * links.SILENCE)
        group = self._group(hosts, broken)
        outcome = RankResult(rank=self.channel.rank, copy=copy)
        if not self.options.rates or self.channel.rank not in group or len(group) < 2:
            return outcome, group, []
        self.log(f"barrier and all_reduce on {len(group)} ranks")
        team = Collective(
            self.channel, group, self.topology.device, self.topology.backend or "gloo", 2 if self.options.quick else 5
        )
        points: list[Point] = []
        found: list[Link] = []
        try:
            team.join()
            team.check()
            outcome = replace(outcome, checked=True)
            if self.topology.device.type != "cpu" or self.options.send_recv:
                found = self._device_pairs(team, {rank: hosts[rank] for rank in group})
            sizes = collective.QUICK_SIZES if self.options.quick else collective.SIZES
            left = max(1.0, self.options.budget - (time.monotonic() - self.started))
            for point in team.curve(sizes, left, self.log):
                points.append(point)
        except Stuck as error:
            outcome = replace(outcome, error=str(error))
        if team.number == 0:
            outcome = replace(outcome, points=[point.plain() for point in points])
        with contextlib.suppress(Exception):
            team.leave()
        return outcome, group, found

    def _group(self, hosts: Mapping[int, str], broken: Set[Pair]) -> list[int]:
        """Called on: all ranks. The ranks that are still there and can all talk to each other, as rank 0 sees it."""
        if self.channel.rank == 0:
            ranks = sorted(set(hosts) - set(self.channel.missing))
            number = {rank: place for place, rank in enumerate(ranks)}
            between = [(number[a], number[b]) for a, b in broken if a in number and b in number]
            self.channel.send("group", [ranks[place] for place in schedule.together(len(ranks), between)])
        received: dict[int, list[int]] = self.channel.receive("group", 4 * links.SILENCE, of=[0])
        return received.get(0, [])

    def _device_pairs(self, team: Collective, hosts: Mapping[int, str]) -> list[Link]:
        """Called on: the ranks of the group. Send and receive by pairs, for a third of the time that is left."""
        size = 1 << 20 if self.options.quick else 1 << 24
        order = schedule.rounds(hosts, schedule.fewer(hosts, list(combinations(sorted(hosts), 2)), MOST_PAIRS))
        end = time.monotonic() + max(1.0, self.options.budget - (time.monotonic() - self.started)) / 3
        found = []
        for number, together in enumerate(order):
            if not team.all_go_on(f"device pairs/{number}", time.monotonic() < end):
                self.log(f"send and receive: {number} of {len(order)} rounds, then the time budget is used up")
                break
            self.log(f"send and receive: round {number + 1} of {len(order)}")
            measured = [team.pair(pair, size) for pair in together]
            found += [link for link in measured if link is not None]
        return found

    def _report(
        self,
        members: Mapping[int, RankInfo],
        tried: Sequence[int],
        contacts: Sequence[Contact],
        group: Sequence[int],
    ) -> NetReport:
        received = self.channel.receive("last words", 2 * collective.LIMIT, log=self.log)
        outcomes = {rank: RankResult.of(words["outcome"]) for rank, words in received.items()}
        measured: list[Link] = read_all(Link, {rank: words["links"] for rank, words in received.items()})
        for rank in sorted(set(members) - set(outcomes)):
            outcomes[rank] = RankResult(rank=rank, error="it went away, or hangs, before it could say how it is")
        points = next((outcome.points for outcome in outcomes.values() if outcome.points), ())
        return NetReport(
            members=[members[rank] for rank in sorted(members)],
            missing=[rank for rank in range(self.channel.world_size) if rank not in members],
            tried=tried,
            contacts=contacts,
            links=merged(measured),
            outcomes=[outcomes[rank] for rank in sorted(outcomes)],
            group=group,
            points=[Point.of(point) for point in points],
        )


def distinguish_hosts(members: dict[int, RankInfo]) -> dict[int, RankInfo]:
    """Nodes that have the same name get their number added, so that they are two."""
    machines: dict[str, set[str]] = {}
    for member in members.values():
        machines.setdefault(member.host, set()).add(member.machine)
    return {
        rank: replace(member, host=f"{member.host}/{member.node}") if len(machines[member.host]) > 1 else member
        for rank, member in members.items()
    }


def merged(measured: Sequence[Link]) -> list[Link]:
    """One for each pair: what the line gave, and what send and receive on the devices did."""
    by_pair: dict[tuple[int, int], Link] = {}
    for link in measured:
        before = by_pair.get((link.a, link.b))
        if before is not None:
            link = replace(before, device_latency=link.device_latency, device_rate=link.device_rate)
        by_pair[link.a, link.b] = link
    return [by_pair[pair] for pair in sorted(by_pair)]


def judged(report: NetReport, *, brief: bool = False) -> list[Finding]:
    """The findings of the nodes, then those of the network; ``brief`` for the screen."""
    own = list(machines.findings(report.members))
    return [*(machines.brief(own) if brief else own), *network_findings.findings(report)]


def cannot_start(error: LockstepError, rank: int) -> Finding:
    """What a rank says that never got to the others."""
    return Finding(check="ranks", status="error", what=f"rank {rank} on {socket.gethostname()}: {error}")
